"""Declares the keys of the configuration with defaults, ranges and descriptions, one module per section."""
