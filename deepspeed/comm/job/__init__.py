"""The job: its mesh and axes, and the process groups made for them."""
