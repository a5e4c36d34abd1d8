"""Ctrl-C at every opcode of farprop's own code: see ``sweep``."""
