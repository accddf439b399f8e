"""Reaching the states of sharded parameters from a program: ``GatheredParameters``, accessors, ``ds_*`` attributes."""
