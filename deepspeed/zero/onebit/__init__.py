"""Drives the optimizers of ``ops.onebit``, which exchange momenta instead of gradients."""
