"""Optimizers as torch ``Optimizer`` classes, and the fused update of flat runs that the ZeRO runtime calls.

In reading order: ``flat`` (the update of a flat run, in cache-sized chunks), ``base`` (the update of ordinary
parameters), then a package per optimizer; ``segments`` (which tensors a run holds) with ``lamb`` and ``muon``;
``elementwise`` (which optimizers work on fragments or have a flat update) and ``build`` (from a config section).

``sparse_attention`` is independent of the rest: attention over selected blocks of a sequence.
"""

from __future__ import annotations

from deepspeed.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {"__compatible_ops__": "deepspeed.ops.op_builder.all_ops:COMPATIBLE"},
    submodules=[
        *("adagrad", "adam", "build", "elementwise", "flat"),
        *("lamb", "lion", "muon", "op_builder", "segments", "sparse_attention", "transformer"),
    ],
)
