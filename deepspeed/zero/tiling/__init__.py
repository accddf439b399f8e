"""Which part of which parameter lies where: pure arithmetic, without process groups."""
