"""Weights of few bits for parts of a model, as the section ``weight_quantization`` says."""
