"""Remote references: the values that this worker owns for others, and those it refers to elsewhere."""
