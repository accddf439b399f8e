"""Runs the real engine as rank *r* of *N* on tensors without values, and counts.

Engine and optimizer are real. The other ranks (``environment``), device, host memory and disk (``simulated_hardware``)
and values that are read from the device (``values``) are simulated. Two steps are run; the second, in which every order
is known and the optimizer has its state, is reported.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from deepspeed.accelerator.devices import in_words
from deepspeed.axes import SEQUENCE, TENSOR
from deepspeed.comm.base.counters import traffic
from deepspeed.engine.initialize import initialize
from deepspeed.engine.inspection import EngineInspection
from deepspeed.errors import DeepSpeedConfigError, DeepSpeedError
from deepspeed.ops.muon import Muon
from deepspeed.parallel.expert.prepare import expert_layers
from deepspeed.parallel.sequence.context import sharing_of
from deepspeed.plan import decoder
from deepspeed.plan.codes import gradient_codec, gradient_sums
from deepspeed.plan.environment import SimulatedPart, simulated_environment
from deepspeed.plan.memory import MemoryCount, Moment
from deepspeed.plan.models import Inputs, Workload
from deepspeed.plan.simulated_hardware import SimulatedDisk
from deepspeed.plan.simulated_stage import SimulatedStage, StageCost
from deepspeed.plan.simulated_step import SimulatedStep
from deepspeed.plan.step_totals import StepTotals
from deepspeed.plan.timeline.step_trace import MarkEvent
from deepspeed.plan.values import OperationCount
from deepspeed.zero.gather.hooks import tensors_in
from deepspeed.zero.placement import Tier
from deepspeed.zero.storage import StorageKind

_MOST_MICRO_BATCHES = 2  # of a step: the first, which represents all but the last, and the last


def loss_of(outputs: Any) -> torch.Tensor:
    """Returns a model's loss: the tensor itself, ``.loss``, or the first item; else raises DeepSpeedConfigError."""
    if isinstance(outputs, dict) and "loss" in outputs:
        outputs = outputs["loss"]
    found = getattr(outputs, "loss", None)
    if not isinstance(found, torch.Tensor):
        found = next((t for t in _in_order(outputs) if t.is_floating_point()), None)
    if found is None:
        raise DeepSpeedConfigError(
            f"plan: the model returned {type(outputs).__name__} without a floating tensor; "
            "let forward return the loss or the logits"
        )
    return found if found.numel() == 1 else found.float().mean()


def _in_order(outputs: Any) -> Iterator[torch.Tensor]:
    if isinstance(outputs, (tuple, list)):
        for item in outputs:
            yield from _in_order(item)
    else:
        yield from tensors_in(outputs)


def simulate_step(
    workload: Workload | None, part: SimulatedPart, other_setting: Callable[[Any], None] | None = None
) -> SimulatedStep:
    """Builds the engine and runs it, its errors unchanged; ``other_setting`` then switches activation checkpointing."""
    with simulated_environment(part) as (count, disk, world):
        found = _SimulatedRun(workload, part, count, disk).result(other_setting)
        found.members = {**{t.axis: t.ranks for t in reversed(world.transports)}, **found.members}
        return found


def heaviest_rank(workload: Workload | None, part: SimulatedPart) -> int:
    """Returns the rank that needs most memory, if that depends on the optimizer; else the rank of ``part``."""
    with simulated_environment(part) as (count, disk, _):
        return _SimulatedRun(workload, part, count, disk).heaviest_rank()


class _SimulatedRun:
    def __init__(
        self, workload: Workload | None, part: SimulatedPart, count: OperationCount, disk: SimulatedDisk
    ) -> None:
        self._workload = workload
        with count.overlooking():
            if workload is not None:
                self._model = workload.model
            else:
                assert part.stage is not None
                self._model = part.stage.module()
        self._part = part
        self._count = count
        self._disk = disk
        most = _MOST_MICRO_BATCHES if part.stage is None else part.stage.micro_batches
        self._steps = min(part.accumulation_steps, most)
        self._activations = 0
        self._states: dict[tuple[StorageKind, Tier], int] = {}
        self._seen = StageCost()  # on a pipeline stage
        self._current_module = CurrentModule(self._model, count)

    def result(self, other_setting: Callable[[Any], None] | None) -> SimulatedStep:
        count, model = self._count, self._model
        self._current_module.enter("initialize")
        # over how many ranks the experts of a layer are spread
        elsewhere = {p: layer.ep_size for _, layer in expert_layers(model) for p in layer.experts.parameters()}
        parameters = sum(p.numel() * elsewhere.get(p, 1) for p in model.parameters())
        trained = sum(p.numel() * elsewhere.get(p, 1) for p in model.parameters() if p.requires_grad)
        repeated = [p for p in model.parameters() if getattr(p, "ds_pipe_replicated", False)]
        engine, inputs = self._ready()
        count.update_peaks()
        init_peak = count.peaks[Tier.DEVICE].nbytes
        try:
            with self._current_module.watched(), self._own_errors_named():
                # As many micro-batches as in the reported step, as memory left allocated by a step depends on it.
                run_step = self._steps_of(engine, inputs)
                run_step()
                inspected = engine.inspect()
                if inspected.updater is not None:
                    inspected.updater.count_state()
                inspected.memory_tracker.reset_peak()
                count.reset_peaks()
                self._activations = 0
                with count.trace.recording():
                    flows = run_step()
            count.update_peaks()
            found = self._found(inspected, parameters, trained, init_peak, flows)
            found.repeated = sum(p.numel() for p in repeated)
            found.repeated_trained = sum(p.numel() for p in repeated if p.requires_grad)
            found.notices += self._while_generating(inspected)
            if other_setting is not None:
                with self._own_errors_named():
                    self._add_other_activations(found, engine, run_step, inputs, other_setting)
        finally:
            engine.destroy()
        return found

    def _found(
        self, engine: EngineInspection, parameters: int, trained: int, init_peak: int, flows: list[StepTotals]
    ) -> SimulatedStep:
        count, memory_tracker = self._count, engine.memory_tracker
        kinds = {(kind, tier): memory_tracker.peak(kind, tier) for kind in StorageKind for tier in Tier}
        return SimulatedStep(
            parameters=parameters,
            trained=trained,
            peaks=count.peaks,
            tops=count.tops,
            kind_peaks={key: nbytes for key, nbytes in kinds.items() if nbytes},
            states={key: nbytes for key, nbytes in self._states.items() if nbytes},
            activations=self._activations,
            pinned=count.most_pinned,
            file_bytes=self._disk.nbytes,
            flow=self._extended(flows),
            init_peak=init_peak,
            members={peers.axis: peers.ranks} if (peers := engine.groups.peers).ranks else {},
            chunk_flops=self._seen.flops,
            chunk_activations=self._seen.kept,
            sums=gradient_sums(engine, self._part.rank, self._part.mesh.world_size, self._part.accumulation_steps),
            codec=gradient_codec(engine),
            is_codec_fixed=engine.driver.reported_codec is not None,
            may_skip=engine.precision.may_skip,
            trace=list(self._count.trace.events),
        )

    def _while_generating(self, engine: EngineInspection) -> list[str]:
        """Returns what ``hybrid_engine`` adds between steps: the whole model if pinned. Its cache is not known."""
        section = self._part.config.get("hybrid_engine") or {}
        sharded = [bucket for bucket in engine.buckets if bucket.is_sharded]
        if not section.get("enabled") or not sharded:
            return []
        each = [bucket.layout.numel * bucket.dtype.itemsize for bucket in sharded]
        if section.get("pin_parameters", True):
            return [
                f"hybrid_engine: while it generates a rank holds {in_words(sum(each))} more than between steps, all "
                "that is sharded, beside the cache of keys and values"
            ]
        return [
            f"hybrid_engine: while it generates layers are gathered for every token, {in_words(sum(each))} in all, "
            f"{in_words(max(each))} the largest"
        ]

    def _add_other_activations(
        self,
        found: SimulatedStep,
        engine: Any,
        run_step: Callable[[], list[StepTotals]],
        inputs: Any,
        other_setting: Callable[[Any], None],
    ) -> None:
        try:
            other_setting(engine)
        except DeepSpeedConfigError as error:
            found.notices.append(str(error))
            return
        self._current_module.enter("forward")
        self._activations = 0
        if self._part.stage is None:
            self._forward(engine, inputs)
        else:
            run_step()
        found.other_activations = self._activations

    def heaviest_rank(self) -> int:
        engine, _ = self._ready()
        inspected = engine.inspect()
        optimizer = inspected.updater.optimizer if inspected.updater is not None else None
        heaviest = optimizer.heaviest_rank if isinstance(optimizer, Muon) else None
        engine.destroy()
        return self._part.rank if heaviest is None else heaviest

    def _ready(self) -> tuple[Any, Any]:
        section = self._part.config.get("optimizer")
        # AdamW stands for a script's own optimizer where the configuration names none.
        is_named = isinstance(section, dict) and section.get("type") is not None
        optimizer = None if is_named else torch.optim.AdamW
        engine = initialize(model=self._model, optimizer=optimizer, config=self._config())[0]
        ranks = self._part.mesh.size(SEQUENCE)
        sizes = self._part.micro_batch, self._part.sequence_length // ranks
        if self._part.stage is not None:
            tokens, labels = self._part.stage.row.items(*sizes)
            if ranks > 1 and self._model.transformers_model is not None:
                return engine, (
                    {"input_ids": tokens, "position_ids": torch.zeros_like(tokens)},
                    {"shift_labels": labels},
                )
            return engine, (tokens, labels)
        assert self._workload is not None
        args, named = self._workload.inputs(*sizes)
        if ranks > 1 and sharing_of(self._model) is not None:
            named = {"position_ids": torch.zeros_like(named["input_ids"]), **named}  # which its attention needs
            named = {"shift_labels": named["labels"], **named} if "labels" in named else named  # as the ranks must
        return engine, (args, named)

    def _config(self) -> dict[str, Any]:
        config = {key: value for key, value in self._part.config.items() if key not in _SIDE_EFFECTS}
        config.pop("train_batch_size", None)
        config["train_micro_batch_size_per_gpu"] = self._part.micro_batch
        config["gradient_accumulation_steps"] = self._steps
        if config.get("pipeline"):  # the module has these already
            given = {"schedule", "num_chunks", "activation_checkpoint_interval"}
            config["pipeline"] = {key: value for key, value in config["pipeline"].items() if key not in given}
        if config.get("tensor_parallel"):  # there are no values to compare
            config["tensor_parallel"] = {**config["tensor_parallel"], "verify": False}
        return config

    def _own_errors_named(self) -> AbstractContextManager[None]:
        part = self._part
        return self._current_module.own_errors_named(
            f"micro-batch {part.micro_batch}, sequences of {part.sequence_length} tokens, tensors without values"
        )

    # -- one step ----------------------------------------------------------------------------------------------------

    def _steps_of(self, engine: Any, inputs: Any) -> Callable[[], list[StepTotals]]:
        """Returns a function that makes a step and returns the traffic of its micro-batches."""
        stage = self._part.stage
        if stage is None:
            return lambda: self._step(engine, inputs, self._steps)
        cut = self._part.config.get("tensor_parallel") or {}
        simulated = SimulatedStage(
            engine,
            stage,
            inputs,
            flow=self._flow,
            held=lambda: self._count.other(Tier.DEVICE),
            enter=self._current_module.enter,
            after_backward=lambda: self._note_states(engine),
            mark=self._count.trace.add,
            sequence_ranks=self._part.mesh.size(TENSOR) if cut.get("sequence_parallel_norms") else 1,
        )

        def step() -> list[StepTotals]:
            self._seen = simulated.step()
            self._activations = max(self._seen.kept.values())
            return [self._seen.middle, self._seen.rest]

        return step

    def _forward(self, engine: Any, inputs: Inputs) -> torch.Tensor:
        held = self._count.other(Tier.DEVICE)
        loss = loss_of(engine(*inputs[0], **inputs[1]))  # other outputs, such as logits, are freed
        self._activations = max(self._activations, self._count.other(Tier.DEVICE) - held)
        return loss

    def _note_states(self, engine: Any) -> None:
        memory_tracker = engine.inspect().memory_tracker
        self._states = {(kind, tier): memory_tracker.live(kind, tier) for kind in StorageKind for tier in Tier}

    def _step(self, engine: Any, inputs: Inputs, micro_batches: int) -> list[StepTotals]:
        """Runs micro-batches up to an update; returns what each moved, up to the end of its step."""
        flows = []
        before = self._flow()
        for number in range(micro_batches):
            self._begin("forward", number)
            engine.set_gradient_accumulation_boundary(number == micro_batches - 1)
            loss = self._forward(engine, inputs)
            self._begin("backward", number)
            engine.backward(loss)
            self._note_states(engine)
            self._begin("step", number)
            engine.step()
            del loss
            flows.append(self._flow().plus(before, -1))
            before = self._flow()
        return flows

    def _begin(self, phase: str, micro_batch: int) -> None:
        self._current_module.enter(phase)
        self._count.trace.add(MarkEvent(phase, micro_batch))

    def _extended(self, flows: list[StepTotals]) -> StepTotals:
        """Returns the totals of all micro-batches; the first of ``flows`` stands for those that were not run."""
        total = StepTotals()
        for flow in flows:
            total = total.plus(flow, 1)
        group = 1 if self._part.stage is None else self._part.stage.pipeline.group
        left_out = self._part.accumulation_steps - self._steps
        return total.plus(flows[0], left_out // group)

    def _flow(self) -> StepTotals:
        return StepTotals(
            requested_along={key: (tally.calls, tally.nbytes) for key, tally in traffic.requested_along.items()},
            ran_along={key: (tally.calls, tally.nbytes) for key, tally in traffic.ran_along.items()},
            flops=self._count.flops,
            down=self._count.copied_down,
            up=self._count.copied_up,
            read=self._disk.read,
            written=self._disk.written,
        )


_SIDE_EFFECTS = frozenset(
    {
        "hybrid_engine",  # its steps are those of any engine
        "elasticity",  # the batch has been chosen
        "tensorboard",
        "wandb",
        "csv_monitor",
        "comet",
        "flops_profiler",
        "comms_logger",
        "run_report",
        "trace",
        "preemption",
        "dump_state",
        "wall_clock_breakdown",
        "memory_breakdown",
        "steps_per_print",
        "log_level",
    }
)
"""Keys for files, logs, generation or signals, which do not change memory or traffic of a step."""


class CurrentModule:
    """Keeps :attr:`MemoryCount.moment` up to date."""

    def __init__(self, model: nn.Module, count: MemoryCount) -> None:
        self._model = model
        self._count = count
        self._names = {module: name for name, module in model.named_modules()}
        self._stack: list[str] = []

    def enter(self, phase: str, module: str = "") -> None:
        """Records that a phase begins, or a module in it."""
        self._count.moment = Moment(phase, module)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Reports the begin and end of modules inside the context."""
        before = nn.modules.module.register_module_forward_pre_hook(self._before)
        after = nn.modules.module.register_module_forward_hook(self._after, always_call=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    @contextmanager
    def own_errors_named(self, circumstances: str) -> Iterator[None]:
        """Turns an error of the model's own code into a DeepSpeedConfigError that names the circumstances."""
        try:
            yield
        except DeepSpeedError:
            raise
        except (Exception, SystemExit) as error:
            place = _own_place(error)
            if place is None:
                raise
            remedy = (
                "Choose sizes that the model allows, and keep what depends on values (masks that select, .tolist())"
            )
            if isinstance(error, SystemExit):
                remedy = "Keep calls that end the program"
            raise DeepSpeedConfigError(
                f"plan: {self._count.moment.phase or 'the step'} of {type(self._model).__name__} failed at "
                f"{place}: {type(error).__name__}: {error} ({circumstances}). {remedy} out of forward"
            ) from error

    def _before(self, module: nn.Module, _args: Any) -> None:
        name = self._names.get(module)
        if name is not None:
            self._stack.append(name)
            self.enter(self._count.moment.phase, name)

    def _after(self, module: nn.Module, _args: Any, output: Any) -> None:
        name = self._names.get(module)
        if name is None or not self._stack:
            return
        self._stack.pop()
        self.enter(self._count.moment.phase, self._stack[-1] if self._stack else "")
        if self._count.moment.phase == "forward" and torch.is_grad_enabled():
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(lambda _gradient, name=name: self.enter("backward", name))


def _own_place(error: BaseException) -> str | None:
    """Returns the innermost line of the model's own code in a traceback; None if there is none."""
    ours = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.dirname(__file__)) + os.sep, "<")
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        name = os.path.basename(frame.filename)
        is_model = frame.filename == decoder.__file__ or not frame.filename.startswith(ours)
        if is_model and name != "contextlib.py":
            return f"{name}, line {frame.lineno}"
    return None
