"""Workers, a network and programs on one thread with a virtual clock, to prove protocols.

Of the kinds of jobs, those in ``passes`` are for backward passes, and those in ``groups`` for process groups; the rest
of this is about remote references.

Everything in a run follows from its seed. ``world`` puts a run together, ``worker`` is a runtime in miniature around
the machine under test, ``program`` does what programs do, ``weather`` and ``network`` what networks and crashes do.
``ledger`` knows what really happened, ``checks`` compares, and ``flaws`` breaks the machine to see that they notice.
"""
