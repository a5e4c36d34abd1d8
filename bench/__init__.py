"""Farprop against torch.distributed, in one run: `python -m bench`.

Also `python -m bench.memory` (memory and idle CPU) and `python -m bench.peers` (Ray and Monarch).
"""
