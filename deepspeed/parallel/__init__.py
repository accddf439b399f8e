"""Divides a model's layers and tensors over ranks."""
