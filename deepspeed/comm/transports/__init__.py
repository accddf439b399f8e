"""How flat buffers and activations are sent between the ranks of one group, over any backend."""
