"""Scaling: what a call, a worker and a start cost as the number of workers grows."""
