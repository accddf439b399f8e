"""Gives programs the states of sharded parameters: ``GatheredParameters``, accessors, ``ds_*`` attributes."""
