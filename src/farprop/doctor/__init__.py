"""What is wrong with a machine, or between the hosts of a job, and what to do about it."""
