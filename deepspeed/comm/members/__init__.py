"""Connects the processes of a run whose ranks may change, and agrees on the next job when ranks are lost or join."""
