"""Simulated jobs that test the protocol of backward passes; ``tests.simulation`` says what they share with the others.

``forward`` makes a random graph over some workers. ``worker``, ``origin``, ``context`` and ``local_pass`` are a small
runtime around the state machines under test, and ``threads`` its threads. ``world`` sets a run up and draws its
faults. ``network`` delivers, delays and loses messages. ``history`` records what really happened in each pass, and
``checks`` compares. ``mutants`` and ``runtime_mutants`` break things to see that the checks notice.
"""
