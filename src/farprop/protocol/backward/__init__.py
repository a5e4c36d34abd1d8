"""The protocol of distributed backward passes: one worker's state machine, and termination detection."""
