"""``hybrid_engine``: an engine which trains and generates."""

from __future__ import annotations

from typing import ClassVar

from deepspeed.config.section import Section, key
from deepspeed.config.types import Bool, Int


class HybridEngine(Section):
    """An engine which trains and generates, for reinforcement learning."""

    _feature: ClassVar[str] = "deepspeed.engine.generation"

    enabled: Bool = key(False, "Build that engine.")
    max_out_tokens: Int = key(512, "Length of the cache.", unit="tokens", above=0)
    inference_tp_size: Int = key(1, "Tensor-parallel degree while generating.", unit="ranks", above=0)
    release_inference_cache: Bool = key(False, "Free the cache after generating.")
    pin_parameters: Bool = key(True, "Keep parameters gathered while generating.")
    tp_gather_partition_size: Int = key(8, "Layers gathered at once.", unit="layers", above=0)
    enable_cuda_graph: Bool = key(False, "Generate through CUDA graphs.")
