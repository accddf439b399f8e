"""The engine feature of frozen weights: quantizes them by ``weight_quantization``, and shards the bases of LoRA."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from typing_extensions import override

from deepspeed.engine_feature import TENSOR_RANKS, Conflict, EngineFeature, EngineSetup
from deepspeed.linear.bases import groups_of_bases
from deepspeed.linear.parts import quantize_as_configured


class PackedWeights(EngineFeature):
    """Quantizes frozen weights, and shards or offloads frozen bases."""

    title = "weights of few bits"
    setting = "weight_quantization"
    conflicts = (
        Conflict(
            "weight_quantization.enabled",
            lambda setup: (section := setup.root.weight_quantization) is not None and section.enabled,
            TENSOR_RANKS,
            "quantized layers replace those that reduce over tensor-parallel ranks",
            "disable it, or set tensor_parallel.autotp_size to 1 and let ZeRO stage 3 share the weights",
        ),
    )

    @override
    def reshape(self, setup: EngineSetup) -> Mapping[int, nn.Parameter]:
        quantize_as_configured(setup.model, setup.root.weight_quantization)
        return {}

    @override
    def settle(self, setup: EngineSetup) -> Mapping[str, bool]:
        return groups_of_bases(setup.model, setup.ranks.data_size)


FEATURE = PackedWeights()
