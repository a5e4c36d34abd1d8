"""Simulated streams: a generator at one end, a loop over its items at the other; ``tests.simulation`` says what all
simulated jobs share. ``world`` is a run with its checks, ``mutants`` breaks the two machines to test them.
"""
