"""What makes a step fast on a device, by one key each: products in float8, losses without whole logits."""
