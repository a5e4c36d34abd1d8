"""Remote references: who refers to what, kept right under any order of messages and under the death of workers.

``machine.References`` is the whole protocol of one worker. ``states`` has the tables, ``messages`` what travels,
``control`` the exactly-once batches between two workers, ``records`` what a worker knows.
"""
