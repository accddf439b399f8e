"""Who belongs to a run whose ranks may change: links between its processes, and how they regroup after a loss."""
