"""Stage 3: gathers parameters before their use and reshards them afterwards."""
