"""Tests of the search for a configuration."""
