"""Measures the constants of predicted times on the machine at hand: what ``ds_plan --measure`` does.

``block_probe`` times a block of a decoder, ``machine`` also the collectives, and puts a ``Device`` together.
"""
