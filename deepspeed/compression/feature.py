"""Compression as a feature of the engine: checks the configuration, and advances the schedule of a prepared model."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from deepspeed.comm.transports.transport import LocalTransport, Reduction, Transport, transfer_key
from deepspeed.compression.eigenvalue import blocks_of
from deepspeed.compression.installing import compress, techniques_on
from deepspeed.compression.pacing import Pace, pace_of, set_pace
from deepspeed.compression.report import changes, compressed_layers, compression_state
from deepspeed.compression.settings import is_on
from deepspeed.compression.snip import SnipPruner
from deepspeed.config.sections.compression import CompressionTraining
from deepspeed.config.sections.quantization import EigenvalueSection, QuantizeTraining
from deepspeed.config.sections.root import Root
from deepspeed.engine_feature import (
    EXPERTS,
    ISLANDS,
    SEQUENCE_RANKS,
    STAGE_3,
    STAGES,
    TENSOR_RANKS,
    Conflict,
    EngineFeature,
    EngineHooks,
    EngineSetup,
)
from deepspeed.errors import CallOrderError, DeepSpeedConfigError
from deepspeed.logging import log_dist
from deepspeed.zero.group import Groups


def _is_prepared(model: nn.Module) -> bool:
    return any(techniques_on(module) is not None for module in model.modules())


def _is_older(root: Root) -> bool:
    return root.quantize_training is not None and root.quantize_training.enabled


def _eigenvalue_of(root: Root) -> EigenvalueSection | None:
    """Returns the enabled section ``eigenvalue``: inside ``quantize_training``, or at the top level; or None."""
    inside = None if root.quantize_training is None else root.quantize_training.eigenvalue
    return next((section for section in (inside, root.eigenvalue) if section is not None and section.enabled), None)


def _is_cut_by_configuration(setup: EngineSetup) -> bool:
    is_compressed = _is_older(setup.root) or _is_prepared(setup.model)
    return is_compressed and setup.root.tensor_parallel.autotp_size > 1


class CompressionHooks(EngineHooks):
    """Holds the schedule of one engine's compressed model, and measures eigenvalues with ``peers``."""

    def __init__(self, schedule: compression_scheduler, peers: Transport) -> None:
        self.schedule = schedule
        self.exposed = {"compression_scheduler": schedule}
        self.states = {"quantization_pace": schedule}
        self._pacing = None if schedule.pace is None else EnginePacing(schedule.pace, peers)

    @property
    @override
    def needs_graph(self) -> bool:
        return self._pacing is not None

    @property
    @override
    def runs_backward(self) -> bool:
        return self._pacing is not None and self._pacing.is_measuring

    @override
    def before_backward(self, loss: torch.Tensor, scale: float, global_steps: int) -> None:
        if self._pacing is not None:
            self._pacing.before_backward(loss, scale, global_steps, self.schedule.training_steps)

    @override
    def before_update(self, global_steps: int, *, has_run_backward: bool) -> None:
        if self._pacing is not None and has_run_backward:
            self._pacing.before_update(global_steps, self.schedule.training_steps)
        self.schedule.before_update()

    @override
    def after_update(self, global_steps: int, *, was_skipped: bool) -> None:
        if not was_skipped:
            self.schedule.step()

    @override
    def resume(self, global_steps: int, skipped_steps: int) -> None:
        self.schedule.at(global_steps - skipped_steps)


class Compression(EngineFeature):
    """Quantizes weights and activations, and prunes, in training."""

    title = "compression in training"
    setting = "compression_training, quantize_training, eigenvalue"
    conflicts = (
        Conflict(
            "compression_training",
            _is_cut_by_configuration,
            TENSOR_RANKS,
            "compressed layers cannot be tensor-parallel",
            "set autotp_size to 1 and use ZeRO, which compression works with at every stage",
        ),
        Conflict(
            "quantize_training.enabled",
            lambda setup: _is_older(setup.root),
            STAGES,
            "it is an older section, for models without pipeline stages",
            "use compression_training.weight_quantization instead",
        ),
        *(
            Conflict("eigenvalue.enabled", lambda setup: _eigenvalue_of(setup.root) is not None, *conflict)
            for conflict in (
                (
                    SEQUENCE_RANKS,
                    "attention between ranks has no second derivative",
                    "set it to false, or set sequence_parallel_size to 1",
                ),
                (
                    STAGE_3,
                    "second derivatives need whole parameters while the graph is alive",
                    "set the stage to 2 or less, or eigenvalue.enabled to false",
                ),
                (ISLANDS, "each island would have bit widths of its own", "leave one of the two out"),
                (
                    EXPERTS,
                    "no rank has a whole block",
                    "keep whole experts on every rank, or set eigenvalue.enabled to false",
                ),
            )
        ),
    )

    @override
    def refuse(self, setup: EngineSetup) -> None:
        root, model = setup.root, setup.model
        is_prepared = _is_prepared(model)
        if root.compression_training is not None and is_on(root.compression_training) and not is_prepared:
            if not hasattr(model, "compression_report"):
                raise DeepSpeedConfigError(
                    "compression_training: techniques are enabled, but the model is not prepared; call "
                    "model = deepspeed.compression.init_compression(model, config) before the optimizer and initialize"
                )
            log_dist(
                "compression_training: redundancy_clean has finished this model, so the section has no effect",
                level=logging.WARNING,
            )
        if _is_older(root) and is_prepared:
            raise DeepSpeedConfigError(
                "quantize_training.enabled: the model is prepared by init_compression already; use "
                "compression_training.weight_quantization instead"
            )
        section = _eigenvalue_of(root)
        if section is not None:
            _check_blocks(root, section, model)

    @override
    def reshape(self, setup: EngineSetup) -> Mapping[int, nn.Parameter]:
        section = setup.root.quantize_training
        if section is not None and section.enabled:
            _quantize_in_training(section, setup.model)
        if _is_prepared(setup.model):  # with eigenvalue.enabled, bits fall later in blocks with large eigenvalues
            set_pace(setup.model, _eigenvalue_of(setup.root))
        return {}

    @override
    def hooks(self, setup: EngineSetup, runtime: Any, groups: Groups, batch_size: int) -> EngineHooks | None:
        if not _is_prepared(setup.model):
            return None
        return CompressionHooks(compression_scheduler(setup.model), groups.peers)


def _check_blocks(root: Root, section: EigenvalueSection, model: nn.Module) -> None:
    """Raises if no weight in the blocks of the section has a falling bit width."""
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
            f"eigenvalue.enabled: no weight in the blocks of {section.layer_name!r} has a bit width that "
            "falls; enable quantize_training, or compression_training.weight_quantization with "
            "quantize_weight_in_forward false and start_bits above target_bits, or set eigenvalue.enabled to "
            "false"
        )


def _quantize_in_training(section: QuantizeTraining, model: nn.Module) -> None:
    """Quantizes every weight of the model with falling bits, as ``compression_training`` does."""
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


FEATURE = Compression()


_BUCKET = (1 << 15) - 2  # a number that no bucket has


class EnginePacing:
    """Measures eigenvalues for one engine, over the ranks with other samples."""

    def __init__(self, pace: Pace, transport: Transport) -> None:
        self._pace = pace
        self._transport = transport
        self._rounds = 0
        self._seen: int | None = None  # updates at the latest measurement
        self.is_measuring = False  # whether the backward that runs now is part of a measurement, not of training

    def before_backward(self, loss: torch.Tensor, scale: float, global_steps: int, updates: int) -> None:
        """Measures, on every rank, if the update after a 0-dim loss needs it; ``updates`` leaves skipped ones out."""
        if self._seen == global_steps or not self._pace.is_due(global_steps, updates):
            return
        self.is_measuring = True
        try:
            self._pace.measure(loss, scale, self._mean)
        finally:
            self.is_measuring = False
        self._seen = global_steps

    def before_update(self, global_steps: int, updates: int) -> None:
        """Raises CallOrderError if the next update needs eigenvalues, but the program ran the backward itself."""
        if self._seen != global_steps and self._pace.is_due(global_steps, updates):
            raise CallOrderError(
                "engine.step: eigenvalue.enabled needs the graph of the loss, which the engine has not seen: call "
                "engine.backward(loss) at the boundary instead of loss.backward(), or set eigenvalue.enabled to false"
            )

    def _mean(self, flat: torch.Tensor) -> torch.Tensor:
        transport = self._transport
        if isinstance(transport, LocalTransport):
            return flat
        numel = flat.numel()
        sent = torch.nn.functional.pad(flat, (0, -numel % (64 * transport.size)))
        mean = torch.empty_like(sent)
        self._rounds += 1
        key = transfer_key(transport.owner, _BUCKET, 1, self._rounds)
        how = Reduction(1.0 / transport.size, key, "a product with the Hessian", sent.numel())
        transport.all_reduce(sent, mean, how).wait()
        return mean[:numel]


class compression_scheduler:  # noqa: N801 - a published name
    """Activates the techniques of a model, each at its ``schedule_offset``. The engine has one and advances it."""

    def __init__(self, model: nn.Module, compression_config: Any = None) -> None:
        self._model = model
        self._layers = list(compressed_layers(model))
        self._state = compression_state(model)
        self._marks: list[object] = []
        found = [(m, pruning) for m, techniques in self._layers if (pruning := techniques.prunings.get("sparse"))]
        plan = found[0][1].plan if found else None
        self._snip = None if plan is None else SnipPruner(plan, [module for module, _ in found])
        # schedule of bit widths that depend on eigenvalues; None if all depend on the step alone
        self.pace = pace_of(model)
        self.training_steps = -1  # updates so far; skipped ones do not count
        self.at(0)

    def before_update(self) -> None:
        """Reads the gradients, for techniques that use them. Every rank must call it.

        Call it after the last backward and before the update. The engine does so; a custom training loop must do so for
        the method ``snip_momentum``.
        """
        if self._snip is not None and not self._snip.plan.is_over(self.training_steps):
            self._snip.score_gradients()

    def step(self, step_zero_check: bool = False) -> None:
        """Advances the schedule by one update. Call it after each update.

        ``step_zero_check``: do not count an update; only activate techniques that start at update 0.
        """
        steps = self.training_steps + (not step_zero_check)
        pruned = None
        if self._snip is not None and not step_zero_check and not self._snip.plan.is_over(self.training_steps):
            pruned = self._snip.after_update(steps)
        self.at(steps)
        if pruned is not None:
            log_dist(pruned)

    def at(self, training_steps: int) -> None:
        """Activates the techniques that are due after ``training_steps`` updates, and logs the new ones."""
        if training_steps == self.training_steps:
            return
        self.training_steps = training_steps
        if self.pace is not None:
            self.pace.advance(training_steps)
        for module, techniques in self._layers:
            techniques.at(training_steps)
            if techniques.activation_offset is not None:
                quantizer: Any = module.activation_quantizer
                quantizer.is_acting = training_steps >= techniques.activation_offset
        marks: list[object] = [
            (techniques.width and techniques.width.bits, techniques.acting, _is_rounded(module))
            for module, techniques in self._layers
        ]
        if marks == self._marks:
            return
        self._marks, state = marks, compression_state(self._model)
        for line in changes(self._state, state, training_steps):
            log_dist(line)
        self._state = state

    def state_dict(self) -> dict[str, Any] | None:
        """Returns the state that the step does not determine; None if there is none."""
        return None if self.pace is None else self.pace.state_dict()

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Restores a state; call :meth:`at` afterwards. None: a state of widths that depend on the step alone."""
        if self.pace is not None:
            self.pace.load_state_dict(state or {})
            self.training_steps = -1


def _is_rounded(module: Any) -> bool:
    quantizer = getattr(module, "activation_quantizer", None)
    return quantizer is not None and quantizer.is_acting
