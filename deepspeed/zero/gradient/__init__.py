"""From ``.grad`` to the reduced gradient that the update reads."""
