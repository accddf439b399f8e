"""What the engine knows of compression: what it refuses, the older section, and the schedule that it advances."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from torch import nn

from deepspeed.config.sections.compression import CompressionTraining
from deepspeed.config.sections.quantization import QuantizeTraining
from deepspeed.config.sections.root import Root
from deepspeed.engine.rooms import COMPRESSION, is_loaded, is_pipeline
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.logging import log_dist

if TYPE_CHECKING:
    from deepspeed.compression.scheduler import compression_scheduler


def is_compressed(model: nn.Module) -> bool:
    """Whether ``init_compression`` has prepared the model."""
    if not is_loaded(COMPRESSION):
        return False
    from deepspeed.compression.installing import techniques_on

    return any(techniques_on(module) is not None for module in model.modules())


def refuse_what_is_not_compressed(root: Root, model: nn.Module) -> None:
    """A section that would do nothing, and layers that two features want.

    Raises:
        DeepSpeedConfigError: There is such a thing.
    """
    older = root.quantize_training is not None and root.quantize_training.enabled
    prepared = is_compressed(model)
    if _is_on(root.compression_training) and not prepared:
        if not hasattr(model, "compression_report"):
            raise DeepSpeedConfigError(
                "compression_training: its techniques are on, but the model is not prepared for them; call "
                "model = deepspeed.compression.init_compression(model, config) before the optimizer and initialize"
            )
        log_dist(
            "compression_training: redundancy_clean has finished this model, so nothing of the section acts",
            level=logging.WARNING,
        )
    if older and (prepared or is_pipeline(model)):
        why = "the model is prepared by init_compression already" if prepared else "the model is a PipelineModule"
        raise DeepSpeedConfigError(
            f"quantize_training.enabled: {why}; say it by compression_training.weight_quantization instead"
        )
    if (prepared or older) and root.tensor_parallel.autotp_size > 1:
        raise DeepSpeedConfigError(
            f"tensor_parallel.autotp_size {root.tensor_parallel.autotp_size}: layers that are compressed cannot be cut "
            "over ranks; set it to 1 and use ZeRO, which compression works with at every stage"
        )


def quantize_in_training(section: QuantizeTraining | None, model: nn.Module) -> None:
    """``quantize_training``: every weight of the model with bits that fall, as by ``compression_training``."""
    if section is None or not section.enabled:
        return
    from deepspeed.compression.installing import compress

    shared = {
        "enabled": True,
        "schedule_offset": section.quantize_schedule.schedule_offset,
        "quantize_groups": section.quantize_groups,
        "quantization_type": section.quantize_algo.q_type,
        "rounding": section.quantize_algo.rounding,
        "quantize_weight_in_forward": False,
        "fp16_mixed_quantize": section.fp16_mixed_quantize.model_dump(),
    }
    params = {
        "start_bits": section.quantize_bits.start_bits,
        "target_bits": section.quantize_bits.target_bits,
        "quantization_period": section.quantize_schedule.quantize_period,
    }
    groups = {"quantize_training": {"params": params, "modules": ["*"]}}
    technique = {"shared_parameters": shared, "different_groups": groups}
    compress(model, CompressionTraining.model_validate({"weight_quantization": technique}))


def schedule_of(model: nn.Module) -> compression_scheduler | None:
    """The schedule of a prepared model; None for any other."""
    if not is_compressed(model):
        return None
    from deepspeed.compression.scheduler import compression_scheduler

    return compression_scheduler(model)


def _is_on(section: CompressionTraining | None) -> bool:
    if section is None:
        return False
    from deepspeed.compression.settings import is_on

    return is_on(section)
