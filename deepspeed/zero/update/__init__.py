"""Updates the master weights: gradient norm and clipping, the loop over the masters, publication of the new weights."""
