"""Runs that a scheduler may end at any time: a signal finishes the step, saves, and leaves with a code of its own."""
