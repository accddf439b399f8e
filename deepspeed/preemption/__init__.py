"""Runs that a scheduler may stop: on a signal, ranks finish the step, save, and exit with a code of its own."""
