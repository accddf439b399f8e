"""Encodes values in fewer bits for sending, and runs collectives on encoded values."""
