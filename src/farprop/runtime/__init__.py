"""Threads and process-wide state live here and nowhere else."""
