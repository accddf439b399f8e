"""Mixture of experts: routing, dispatch between ranks, layers, and Transformers models whose experts are spread."""
