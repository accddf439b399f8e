"""The watchdog: waits that can end in a sentence instead of a hang."""
