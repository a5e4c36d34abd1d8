"""Remote references: which worker refers to which value, under any order of messages and when workers die.

``state_machine`` is the whole protocol of one worker; it joins ``owner_side``, ``user_side``, ``forks_in_transit`` and
the ``control_plane`` that they share, which carries operations between workers. ``records`` has the states, and what is
known about each reference.
"""
