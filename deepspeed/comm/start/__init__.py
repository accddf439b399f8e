"""How a process joins its job: environment, rendezvous, admission, the first process group."""
