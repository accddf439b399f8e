"""Activation checkpointing: drops a block's activations in forward and recomputes them in backward.

``deepspeed.checkpointing`` shows :mod:`deepspeed.activation_checkpointing.checkpointing`. The saved memory is every
activation inside the block; the price is a second forward of it (`Chen et al. <https://arxiv.org/abs/1604.06174>`_).
"""
