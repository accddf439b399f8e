"""Engines of this package in the interfaces of other trainers. Each module imports its library when it is used."""
