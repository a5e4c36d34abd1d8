"""Parcels alone: one caller, the workers of several hosts, and a network that is slow, and faults."""
