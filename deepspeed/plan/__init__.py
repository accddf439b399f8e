"""Estimates before a run: how much memory a model needs."""
