"""Linear layers with quantized weights, and with low-rank adapters beside a frozen base."""

from __future__ import annotations

from deepspeed.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "Init": "deepspeed.linear.init",
        "LoRAConfig": "deepspeed.linear.config",
        "LoRAOptimizedLinear": "deepspeed.linear.optimized_linear",
        "OptimizedLinear": "deepspeed.linear.optimized_linear",
        "QuantizationConfig": "deepspeed.linear.config",
        "QuantizedLinear": "deepspeed.linear.quantized_linear",
        "init_lora": "deepspeed.linear.init",
        "quantize_model": "deepspeed.linear.quantize",
    },
    submodules=["config"],
)
