"""Sockets, TLS and shared memory: moves messages between two processes, and does not interpret them."""
