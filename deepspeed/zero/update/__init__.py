"""The update: masters, norm, and the loop over them."""
