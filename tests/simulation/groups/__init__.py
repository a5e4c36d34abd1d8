"""Simulated process groups, whose ranks send each other fingerprints of their collectives; ``tests.simulation`` says
what all simulated jobs share. ``world`` is a run with its checks, ``mutants`` breaks the state machine to test them.
"""
