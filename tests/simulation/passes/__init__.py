"""Simulated jobs that prove the protocol of backward passes; ``tests.simulation`` says what they share with the others.

``forward`` makes a random graph over some workers; ``worker``, ``origin`` and ``local`` are a runtime in miniature
around the machines under test; ``network`` and ``weather`` do what networks and crashes do. ``stories`` knows what
really happened in each pass, ``checks`` compares, ``world`` puts a run together, and ``flaws`` breaks things to see
that the checks notice.
"""
