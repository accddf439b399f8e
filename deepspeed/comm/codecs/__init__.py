"""Codecs: values in fewer bits, collectives that carry them, and when they pay."""
