"""One pipeline stage in a simulation: its engine runs the schedule, with simulated messages of other stages."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from deepspeed.accelerator import get_accelerator
from deepspeed.axes import PIPE
from deepspeed.comm.base.counters import traffic
from deepspeed.engine.inspection import EngineInspection
from deepspeed.errors import PipelineError
from deepspeed.parallel.pipe.channel import ACTIVATIONS, GRADIENTS
from deepspeed.parallel.pipe.module import PipelineModule
from deepspeed.parallel.pipe.schedule.lists import (
    PASSES,
    BackwardInput,
    BackwardPass,
    BackwardWeight,
    ForwardPass,
    Kind,
    OptimizerStep,
    RecvActivation,
    RecvGrad,
    Schedule,
    StageSchedule,
)
from deepspeed.parallel.pipe.spec import LayerSpec, TiedLayerSpec
from deepspeed.parallel.pipe.values import MessageLayout, map_tensors, put_together, slots_of, taken_apart
from deepspeed.plan.memory import META
from deepspeed.plan.models import LayerRow
from deepspeed.plan.pipeline import Pipeline
from deepspeed.plan.step_totals import StepTotals
from deepspeed.plan.timeline.step_trace import MarkEvent

_KINDS = {instruction: kind for kind, instruction in PASSES.items()}
_MARKS = {**{kind: kinds.value for kind, kinds in _KINDS.items()}, OptimizerStep: "step"}
_PHASES: dict[type, str] = {
    RecvActivation: "forward",
    ForwardPass: "forward",
    RecvGrad: "backward",
    BackwardPass: "backward",
    BackwardInput: "backward",
    BackwardWeight: "backward",
    OptimizerStep: "step",
}


@dataclass(frozen=True)
class Stage:
    """The stage of a pipeline that a rank is on."""

    stage: int  # its number, from 0
    pipeline: Pipeline
    row: LayerRow  # the whole model
    bounds: tuple[int, ...]  # bounds of the chunks among the layers
    micro_batches: int  # micro-batches of a step that represents longer ones
    checkpointing: bool = False  # layers save only their inputs

    @property
    def schedule(self) -> Schedule:
        """Schedule of the step."""
        return self.pipeline.of(self.micro_batches)

    def module(self) -> PipelineModule:
        """Returns the module of the rank."""
        with torch.device(META):
            return PipelineModule(
                self.row.layers(),
                num_stages=self.pipeline.stages,
                loss_fn=self.row.loss_fn,
                partition_method=list(self.bounds),
                activation_checkpoint_interval=int(self.checkpointing),
                schedule=self.pipeline.schedule,
                num_chunks=self.pipeline.num_chunks,
            )


@dataclass
class StageCost:
    """Holds the costs of a stage's computations."""

    # operations for one micro-batch, of each of its chunks in order and each kind of computation
    flops: dict[int, dict[Kind, int]] = field(default_factory=lambda: defaultdict(dict))
    # for each of its chunks, bytes that a forward keeps for backward, received inputs included
    kept: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    # traffic and computation of a group of micro-batches in the middle of a step
    middle: StepTotals = field(default_factory=StepTotals)
    rest: StepTotals = field(default_factory=StepTotals)  # traffic and computation of the rest of the step


class SimulatedChannels:
    """The channels of a stage: sends are counted, and received messages have the shapes that they would have.

    Attributes:
        watch: None: there are no other ranks to wait for.
        kept: 0, as messages are sent at once.
        forms: By chunk, the description of its output; set by :class:`SimulatedStage`.
    """

    watch = None
    kept = 0

    def __init__(self, stage: Stage, *, packs: bool) -> None:
        self.stage = stage.stage
        self.forms: dict[int, Any] = {}
        self._packs = packs
        self._order: dict[tuple[str, int], Iterator[int]] = {}
        order: dict[tuple[str, int], list[int]] = defaultdict(list)
        for instruction in itertools.chain.from_iterable(StageSchedule(stage.schedule, stage.stage)):
            if isinstance(instruction, (RecvActivation, RecvGrad)):
                kind = ACTIVATIONS if isinstance(instruction, RecvActivation) else GRADIENTS
                order[kind, instruction.peer].append(instruction.chunk)
        for key, chunks in order.items():
            self._order[key] = itertools.cycle(chunks)

    def incoming(self, kind: str, stage: int) -> _SimulatedReceiver:
        """Returns the channel that carries ``kind`` from another stage."""
        return _SimulatedReceiver(self, kind, stage)

    def connect_pairs(self, _stage_of: Sequence[int]) -> None:
        """Does nothing: there is nothing to connect."""

    def outgoing(self, kind: str, stage: int) -> _Outgoing:
        """Returns the channel that carries ``kind`` to another stage."""
        return _Outgoing(packs=self._packs)

    def drain(self) -> None:
        """Returns at once."""

    def batch(self) -> AbstractContextManager[None]:
        """Returns an empty context: no other stage runs."""
        return nullcontext()

    def received(self, kind: str, stage: int) -> Any:
        """Returns the next message of a kind from another stage, in new memory."""
        chunk = next(self._order[kind, stage])
        form = self.forms[chunk - 1 if kind == ACTIVATIONS else chunk]
        slots = slots_of(form)
        if kind == GRADIENTS:
            return [slot.empty(META) for slot in slots if slot.requires_grad]
        return put_together(form, [slot.empty(META).requires_grad_(slot.requires_grad) for slot in slots])


@dataclass(frozen=True)
class _SimulatedReceiver:
    channels: SimulatedChannels
    kind: str
    stage: int

    def expect(self, count: int) -> None:
        """Does nothing: no receive is posted."""

    def take(self, micro_batch: int) -> Any:
        return self.channels.received(self.kind, self.stage)


class _Outgoing:
    def __init__(self, *, packs: bool) -> None:
        self._packs = packs

    def send(self, micro_batch: int, value: Any) -> None:
        nbytes, transfers = MessageLayout(slots_of(taken_apart(value)[0]), packs=self._packs).cost
        traffic.record_requested("send", nbytes, PIPE)
        traffic.record_ran("send", nbytes, PIPE, transfers)


class SimulatedStage:
    """Runs steps of a stage.

    Args:
        flow: Returns the totals so far.
        held: Bytes on the device that no memory tracker counts.
        enter: Called with each phase that begins.
        after_backward: Called after each computation of gradients.
        mark: Called when a computation begins, and with ``other`` when it ends.
        sequence_ranks: Ranks that share a sequence between blocks; 1: it is whole.
    """

    def __init__(
        self,
        engine: Any,
        stage: Stage,
        items: tuple[Any, Any],
        *,
        flow: Callable[[], StepTotals],
        held: Callable[[], int],
        enter: Callable[[str], None],
        after_backward: Callable[[], None],
        mark: Callable[[MarkEvent], None],
        sequence_ranks: int = 1,
    ) -> None:
        self._engine, self._items = engine, items
        self._flow, self._held, self._enter, self._after_backward = flow, held, enter, after_backward
        self._mark = mark
        self._chunks = stage.schedule.chunks_of(stage.stage)
        group = stage.pipeline.group
        self._middle = range(group, 2 * group) if stage.micro_batches >= 3 * group else range(0)
        self._seen = StageCost()
        self._arrived: Counter[tuple[int, int]] = Counter()  # bytes, by chunk and micro-batch
        inspected: EngineInspection = engine.inspect()
        interpreter, precision = inspected.interpreter, inspected.precision
        assert interpreter is not None, "the engine is one of a pipeline"
        assert isinstance(interpreter.channels, SimulatedChannels), "made by simulated_environment"
        interpreter.wrap_handlers(self._watched)
        context = precision.forward_context(get_accelerator())
        sequences = SequenceLayout.of(engine.module, sequence_ranks)
        interpreter.channels.forms = forms_between(stage, items, precision.compute_dtype, context, sequences)

    def step(self) -> StageCost:
        """Runs one step; an exception of a layer or the loss passes through."""
        self._seen = StageCost()
        self._arrived.clear()
        before = self._flow()
        try:
            self._engine.train_batch(itertools.repeat(self._items))
        except PipelineError as error:
            raise (error.__cause__ or error) from None
        # Before the first instruction ranks also exchange whether all have their data.
        self._seen.rest = self._flow().plus(before, -1).plus(self._seen.middle, -1)
        return self._seen

    def _watched(self, kind: type, run: Callable[..., None]) -> Callable[..., None]:
        def watched(**arguments: Any) -> None:
            before, held = self._flow(), self._held()
            if kind in _PHASES:
                self._enter(_PHASES[kind])
            if (phase := _MARKS.get(kind)) is not None:
                self._mark(MarkEvent(phase, arguments.get("micro_batch", -1), arguments.get("chunk", -1)))
            run(**arguments)
            if phase is not None:
                self._mark(MarkEvent("other", -1))
            moved = self._flow().plus(before, -1)
            seen, micro_batch = self._seen, arguments.get("micro_batch")
            if micro_batch in self._middle:
                seen.middle = seen.middle.plus(moved, 1)
            else:
                seen.rest = seen.rest.plus(moved, 1)
            if kind in _KINDS:
                seen.flops[self._chunks.index(arguments["chunk"])][_KINDS[kind]] = moved.flops
            if kind in (RecvActivation, ForwardPass):
                self._note_activations(arguments["chunk"], arguments["micro_batch"], self._held() - held)
            if kind in (BackwardPass, BackwardWeight):
                self._after_backward()

        return watched

    def _note_activations(self, chunk: int, micro_batch: int, nbytes: int) -> None:
        self._arrived[chunk, micro_batch] += nbytes
        own = self._chunks.index(chunk)
        self._seen.kept[own] = max(self._seen.kept[own], self._arrived[chunk, micro_batch])


@dataclass(frozen=True)
class SequenceLayout:
    """The layers between which ranks have parts of sequences (``tensor_parallel.sequence_parallel_norms``)."""

    blocks: range = range(0)  # numbers of the layers; the output of the last is whole
    ranks: int = 1  # that share a sequence; 1: sequences are whole everywhere

    @classmethod
    def of(cls, module: PipelineModule, ranks: int) -> SequenceLayout:
        """Returns the layout of a module whose activations ``ranks`` ranks share."""
        return cls(module.run_of_blocks()[:-1], ranks) if ranks > 1 else cls()

    def cut(self, number: int, value: Any) -> Any:
        """Returns a rank's part of the output of layer ``number``: of the first tensor, or the whole output."""
        if number not in self.blocks:
            return value
        first, rest = (value[0], value[1:]) if isinstance(value, tuple) else (value, None)
        part = first.narrow(1, 0, first.shape[1] // self.ranks).contiguous()
        return part if rest is None else (part, *rest)


def forms_between(
    stage: Stage, items: tuple[Any, Any], dtype: torch.dtype | None, context: Any, sequences: SequenceLayout
) -> dict[int, Any]:
    """Returns descriptions of the output of each chunk, by running all layers once, cast to ``dtype`` if not None."""
    found: dict[int, Any] = {}
    tied: dict[str, nn.Module] = {}
    value = items[0]
    with torch.device(META), context:
        for number, entry in enumerate(stage.row.layers()[: stage.bounds[-2]]):
            run: Any = entry
            if isinstance(entry, TiedLayerSpec):
                module = tied.setdefault(entry.key, entry.build()).to(dtype)
                forward_fn = entry.forward_fn
                run = module if forward_fn is None else lambda x, f=forward_fn, m=module: f(m, x)
            elif isinstance(entry, LayerSpec):
                run = entry.build().to(dtype)
            elif isinstance(entry, nn.Module):
                run = entry.to(dtype)
            value = map_tensors(run(value), lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad))
            if number + 1 in stage.bounds:
                found[stage.bounds.index(number + 1) - 1] = taken_apart(sequences.cut(number, value))[0]
    return found
