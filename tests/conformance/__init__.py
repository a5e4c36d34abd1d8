"""PyTorch's own tests of its RPC, process groups and DDP, run unchanged out of the installed wheel, on farprop.

``python -m tests.conformance --help`` says how.
"""
