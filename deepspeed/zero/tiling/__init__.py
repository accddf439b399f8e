"""Computes which part of which parameter lies where: tiles, buckets, slices, fragments and runs.

This is pure arithmetic, without process groups.
"""
