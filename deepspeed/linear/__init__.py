"""Linear layers with quantized weights, and with low-rank adapters beside a frozen base."""

from __future__ import annotations

from deepspeed.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "deepspeed.linear.init": "Init init_lora",
        "deepspeed.linear.config": "LoRAConfig QuantizationConfig",
        "deepspeed.linear.optimized_linear": "LoRAOptimizedLinear OptimizedLinear",
        "deepspeed.linear.quantized_linear": "QuantizedLinear",
        "deepspeed.linear.quantize": "quantize_model",
    },
    submodules="config",
)
