"""Distributed autograd: contexts, the send and recv nodes of messages, and backward passes."""
