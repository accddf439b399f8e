"""Generates text with a model: :func:`init_inference`, its configuration, quantized weights."""

from __future__ import annotations

from deepspeed.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "deepspeed.inference.config": "DeepSpeedInferenceConfig DeepSpeedTPConfig",
        "deepspeed.inference.engine": "InferenceEngine",
        "deepspeed.inference.initialize": "default_inference_config init_inference",
    },
    submodules="config engine quantization",
)
