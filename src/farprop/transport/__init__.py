"""Bytes between two ends: sockets and shared memory. Knows frames, not what they mean."""
