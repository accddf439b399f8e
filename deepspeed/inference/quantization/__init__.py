"""Weights of few bits for parts of a model, by the section ``weight_quantization``."""
