"""Driving the optimizers of ``ops.onebit``: what travels of them in the place of gradients, and when."""
