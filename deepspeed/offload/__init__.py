"""Keeps shards in host memory or in files, and moves them to the device and back.

``zero`` decides which tier holds which states (``zero.placement``) and runs the update loop (``zero.update.loop``);
this package stores tensors in each tier and moves them. Read ``host``, ``files``, then ``tiers``, which updates states
in files and combines the tiers.
"""
