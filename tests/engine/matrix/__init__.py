"""The equivalence matrix: every combination of settings equals the one-process reference, or is refused."""
