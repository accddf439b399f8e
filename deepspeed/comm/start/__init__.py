"""How a process joins its job: environment, rendezvous, who is let in, the first process group."""
