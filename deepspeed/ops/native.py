"""Which of upstream's native operators a program may count on: those whose Python class works here, uncompiled."""

from __future__ import annotations

COMPATIBLE: dict[str, bool] = {
    "async_io": False,
    "cpu_adagrad": True,
    "cpu_adam": True,
    "cpu_lion": True,
    "evoformer_attn": False,
    "fused_adam": True,
    "fused_lamb": True,
    "fused_lion": True,
    "gds": False,
    "inference_core_ops": False,
    "quantizer": False,
    "random_ltd": False,
    "sparse_attn": True,
    "spatial_inference": False,
    "stochastic_transformer": False,
    "transformer": False,
    "transformer_inference": False,
    "utils": False,
}
