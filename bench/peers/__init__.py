"""Farprop against Ray and Monarch: `python -m bench.peers`."""
