"""Helpers for tests: a leak check, real worker processes that start fast, peers that send arbitrary bytes."""
