"""Keeps shards in host memory or in files, and moves them to the device and back.

``zero`` decides what lives where (``zero.placement``) and runs one update loop (``zero.update.loop``); this package
determines how each tier keeps tensors and moves them. Read ``host``, ``files``, then ``tiers``, which updates what lies
in files and puts them together.
"""
