"""Training jobs that are broken while they run, and what must hold then: see docs/reliability.md."""
