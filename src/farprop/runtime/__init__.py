"""The engine of a worker. All threads and all process-wide state are here."""
