"""Stores the weights of parts of a model in few bits, as the section ``weight_quantization`` requests."""
