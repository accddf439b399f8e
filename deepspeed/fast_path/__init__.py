"""What makes a step fast on a device, by one key each: losses without whole logits."""
