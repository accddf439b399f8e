"""Builds models with sharded parameters (``zero.Init``), and moves the parameters into the buckets of an engine."""
