"""Activation checkpointing: drops a block's activations in forward and recomputes them in backward.

``deepspeed.checkpointing`` is :mod:`deepspeed.activation_checkpointing.checkpointing`. This saves the memory of every
activation inside the block and costs a second forward of it (`Chen et al. <https://arxiv.org/abs/1604.06174>`_).
"""
