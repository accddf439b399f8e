"""Mixture of experts: routes, their dispatch between ranks, layers, and Transformers models that are cut by experts."""
