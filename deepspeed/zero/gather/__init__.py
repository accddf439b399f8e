"""Stage 3: when parameters are gathered and released, and what they are in between."""
