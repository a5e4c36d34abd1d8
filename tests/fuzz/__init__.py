"""Fuzz targets: each parser that reads bytes from a peer. ``tests.security.test_fuzzing`` runs them briefly,
``make fuzz`` for as long as you like.
"""
