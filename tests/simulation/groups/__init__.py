"""Simulated process groups, whose ranks state to each other what they call; ``tests.simulation`` says what they share
with the others. ``world`` is a run and what must hold in it, and ``mutants`` breaks the machine to see that it notices.
"""
