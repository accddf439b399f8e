"""Optimizers as torch ``Optimizer`` classes, and the fused update of flat runs that the ZeRO runtime calls."""
