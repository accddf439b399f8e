"""Watches what each rank waits for, and ends a wait that cannot end with an error message on every rank."""
