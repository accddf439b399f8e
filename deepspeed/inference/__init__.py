"""Generates text with a model: :func:`init_inference`, its configuration, quantized weights."""

from deepspeed.lazy import TYPE_CHECKING, lazy_names

if TYPE_CHECKING:
    from deepspeed.inference import config as config
    from deepspeed.inference import engine as engine
    from deepspeed.inference import quantization as quantization
    from deepspeed.inference import v2 as v2
    from deepspeed.inference.config import DeepSpeedInferenceConfig as DeepSpeedInferenceConfig
    from deepspeed.inference.config import DeepSpeedTPConfig as DeepSpeedTPConfig
    from deepspeed.inference.engine import InferenceEngine as InferenceEngine
    from deepspeed.inference.initialize import default_inference_config as default_inference_config
    from deepspeed.inference.initialize import init_inference as init_inference

lazy_names(__name__)
