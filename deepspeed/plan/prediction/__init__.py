"""Predicts the time of a training step of a decoder from its layout, in milliseconds and without simulating it.

``device_model`` and ``network_model`` estimate how long an operation and a collective take, by a few physical constants
per device. ``layout`` describes how ranks share a decoder, ``block`` what a block computes and keeps. ``step`` puts a
step together and finds what would help most, with its parts in ``step_times`` and its memory in ``step_memory``.
``search`` ranks layouts.
"""
