"""Optimizers as torch ``Optimizer`` classes, and the fused update of flat runs that the ZeRO runtime calls.

In reading order: ``flat`` (the update of a flat run, in cache-sized chunks), ``rounding`` (stochastic rounding of its
results), ``base`` (the update of ordinary parameters), then a package per optimizer; ``fragments`` (which tensors a run
holds) and ``exchange`` (collectives) with ``lamb``, ``muon`` and ``onebit``; ``elementwise`` (which optimizers work on
fragments or have a flat update) and ``build`` (from a config section).

Independent of the rest: ``sparse_attention`` (attention over selected blocks of a sequence), ``packed_linear`` (weights
in few bits), ``vocabulary`` and ``fused_loss`` (losses over a vocabulary that may be cut, without whole
logits), and ``op_builder`` with ``flattening`` (upstream's builders of operators).
"""

from deepspeed.lazy import TYPE_CHECKING, lazy_names

if TYPE_CHECKING:
    from deepspeed.ops import (
        adagrad,
        adam,
        aio,
        build,
        deepspeed4science,
        elementwise,
        flat,
        fp_quantizer,
        fragments,
        lamb,
        lion,
        muon,
        op_builder,
        sparse_attention,
        transformer,
    )
    from deepspeed.ops.fused_loss import linear_cross_entropy
    from deepspeed.ops.op_builder.all_ops import COMPATIBLE as __compatible_ops__

    __all__ = [
        "__compatible_ops__",
        "adagrad",
        "adam",
        "aio",
        "build",
        "deepspeed4science",
        "elementwise",
        "flat",
        "fp_quantizer",
        "fragments",
        "lamb",
        "linear_cross_entropy",
        "lion",
        "muon",
        "op_builder",
        "sparse_attention",
        "transformer",
    ]

lazy_names(__name__)
