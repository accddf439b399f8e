"""The examples keep running: their scripts, their commands and their job files."""
