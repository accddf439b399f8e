"""Reduces gradients: from ``.grad`` to the reduced gradient that the update reads."""
