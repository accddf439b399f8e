"""How flat buffers and activations travel between the ranks of one group, over any backend."""
