"""Codecs: values in fewer bits, and collectives that use them."""
