"""Random distributed programs against the same programs in one process.

A program is made from a seed (``generator``) and is data: blocks of steps, which one interpreter runs in both worlds
(``interpreter``). In one process (``local``) a call copies its arguments, runs the block and copies the results, and
the passes are torch's. On workers (``distributed``) it is a call, and the passes are farprop's. Then everything that
the two left behind is compared (``outcome``): gradients, what hooks saw, and what must not have changed.
"""
