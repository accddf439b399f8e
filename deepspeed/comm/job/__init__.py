"""Which ranks share what: the job's mesh, its axes, and the process groups made for them."""
