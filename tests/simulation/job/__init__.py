"""Whole jobs on virtual time: the real agents of several processes, one network, one clock, one seed.

``install`` puts ``scheduler`` (time and threads), ``process`` (the event loop, the pool, the store) and ``network``
(streams of bytes) in the places of the real ones. ``program`` is what the workers do, ``group`` a process group on the
side, ``world`` a run with its faults. ``checks`` has what must hold, and ``mutants`` breaks the runtime to see that the
checks notice. docs/design.md says more.
"""
