"""Linear layers with quantized weights, and with low-rank adapters beside a frozen base."""

from deepspeed.lazy import TYPE_CHECKING, lazy_names

if TYPE_CHECKING:
    from deepspeed.linear import config as config
    from deepspeed.linear.config import LoRAConfig as LoRAConfig
    from deepspeed.linear.config import QuantizationConfig as QuantizationConfig
    from deepspeed.linear.init import Init as Init
    from deepspeed.linear.init import init_lora as init_lora
    from deepspeed.linear.optimized_linear import LoRAOptimizedLinear as LoRAOptimizedLinear
    from deepspeed.linear.optimized_linear import OptimizedLinear as OptimizedLinear
    from deepspeed.linear.quantize import quantize_model as quantize_model
    from deepspeed.linear.quantized_linear import QuantizedLinear as QuantizedLinear

lazy_names(__name__)
