"""Sends flat buffers and activations between the ranks of one group, over any backend."""
