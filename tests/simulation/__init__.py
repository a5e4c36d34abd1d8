"""Workers, a network and programs on one thread with a virtual clock, to test protocols under every fault.

There are four kinds of simulated jobs: whole ones, with the real runtime (``job``), and the state machines of remote
references (here), backward passes (``passes``) and process groups (``groups``) alone. ``harness`` is what they share,
``runner`` runs many and reports.

Everything in a run follows from its seed. ``world`` sets a run up and draws its faults, ``worker`` is a small runtime
around the state machine under test, ``program`` does what programs do, ``network`` delivers, delays and loses messages.
``ledger`` records what really happened, ``checks`` compares it with what the workers believe, and ``mutants`` breaks
the state machine to see that the checks notice.
"""
