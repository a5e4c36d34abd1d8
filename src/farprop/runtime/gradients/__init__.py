"""Distributed autograd: contexts, the nodes that stand for messages, and backward passes."""
