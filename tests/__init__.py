"""Tests. Run them from the repository root: `make test`."""
