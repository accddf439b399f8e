"""Generates text with a model: :func:`init_inference`, its configuration, quantized weights."""

from __future__ import annotations

from deepspeed.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "DeepSpeedInferenceConfig": "deepspeed.inference.config",
        "DeepSpeedTPConfig": "deepspeed.inference.config",
        "InferenceEngine": "deepspeed.inference.engine",
        "default_inference_config": "deepspeed.inference.initialize",
        "init_inference": "deepspeed.inference.initialize",
    },
    submodules=["config", "engine", "quantization"],
)
