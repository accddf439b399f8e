"""What the engine knows of compression: what it refuses, the older section, and the schedule that it advances."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from torch import nn

from deepspeed.comm.transports.transport import Transport
from deepspeed.config.sections.compression import CompressionTraining
from deepspeed.config.sections.quantization import EigenvalueSection, QuantizeTraining
from deepspeed.config.sections.root import Root
from deepspeed.engine.rooms import COMPRESSION, is_loaded, is_pipeline
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.logging import log_dist

if TYPE_CHECKING:
    from deepspeed.compression.scheduler import compression_scheduler
    from deepspeed.engine.pacing import EnginePacing


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
    older = _is_older(root)
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
    section = eigenvalue_of(root)
    if section is not None:
        _refuse_what_cannot_be_paced(root, section, model)


def eigenvalue_of(root: Root) -> EigenvalueSection | None:
    """The section ``eigenvalue`` that is on: inside ``quantize_training``, or that of the top level."""
    inside = None if root.quantize_training is None else root.quantize_training.eigenvalue
    return next((section for section in (inside, root.eigenvalue) if section is not None and section.enabled), None)


def _refuse_what_cannot_be_paced(root: Root, section: EigenvalueSection, model: nn.Module) -> None:
    """Models without falling bits in the blocks, and ranks of which none has a whole block and the whole loss."""
    from deepspeed.compression.eigenvalue import blocks_of
    from deepspeed.compression.report import compressed_layers

    if root.zero_optimization.stage == 3:
        raise DeepSpeedConfigError(
            "eigenvalue.enabled with zero_optimization.stage 3: second derivatives need whole parameters while the "
            "graph is alive; set the stage to 2 or less, or eigenvalue.enabled to false"
        )
    if root.communication_compression.islands is not None:
        raise DeepSpeedConfigError(
            "eigenvalue.enabled with communication_compression.islands: each island would have bits of its own; leave "
            "one of the two out"
        )
    expert = root.expert_parallel
    if (expert is not None and expert.enabled) or any(
        getattr(parameter, "allreduce", True) is False for parameter in model.parameters()
    ):
        raise DeepSpeedConfigError(
            "eigenvalue.enabled with experts that are spread over ranks: no rank has a whole block; keep whole experts "
            "on every rank, or set eigenvalue.enabled to false"
        )
    blocks = blocks_of(model, section.layer_name, section.layer_num)
    bits = root.quantize_training.quantize_bits if _is_older(root) and root.quantize_training is not None else None
    schedules = [
        techniques.rounding.schedule
        for block in blocks.values()
        for _, techniques in compressed_layers(block)
        if techniques.rounding is not None
    ]
    falls = any(schedule.start > schedule.target for schedule in schedules)
    if not (falls or (bits is not None and bits.start_bits > bits.target_bits)):
        raise DeepSpeedConfigError(
            f"eigenvalue.enabled: no weight in the blocks of {section.layer_name!r} has bits that fall; enable "
            "quantize_training, or compression_training.weight_quantization with quantize_weight_in_forward false and "
            "start_bits above target_bits, or set eigenvalue.enabled to false"
        )


def _is_older(root: Root) -> bool:
    return root.quantize_training is not None and root.quantize_training.enabled


def pace_quantization(root: Root, model: nn.Module) -> None:
    """``eigenvalue``: bits of a prepared model fall later in blocks with large eigenvalues."""
    if not is_compressed(model):
        return
    from deepspeed.compression.pacing import set_pace

    set_pace(model, eigenvalue_of(root))


def pacing_of(schedule: compression_scheduler | None, transport: Transport) -> EnginePacing | None:
    """What measures eigenvalues for the schedule; None where nothing goes by them.

    Args:
        schedule: Of the model.
        transport: Between the ranks that see other samples.
    """
    if schedule is None or schedule.pace is None:
        return None
    from deepspeed.engine.pacing import EnginePacing

    return EnginePacing(schedule.pace, transport)


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
