"""Layers and tokens that training leaves out."""
