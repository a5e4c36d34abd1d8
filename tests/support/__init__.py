"""What the tests stand on: a check for things left behind, and real worker processes that start fast."""
