"""Predicts the time of a training step of a decoder from its layout, in milliseconds and without simulating it.

``device_model`` and ``network_model`` estimate how long an operation and a collective take, by a few physical constants
per device. ``operations`` lists what a block computes and keeps, ``layout`` how ranks share it, ``predict`` puts a step
together, ``predicted`` is the result, ``search`` ranks layouts and ``cost_shares`` finds what would help most.
"""
