"""Layouts: which part of which parameter is where. Pure arithmetic, without process groups."""
