"""Farprop: autograd that reaches across machines, on PyTorch.

Start with :mod:`farprop.rpc`, a drop-in for ``torch.distributed.rpc``.
"""

__version__ = "0.1.0"
