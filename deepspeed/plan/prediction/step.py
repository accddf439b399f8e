"""Predicts the time and the memory of a training step from those of its blocks.

Only transfers that the engine overlaps are overlapped here. Gathers of stage 3 run one layer ahead, gradients are sent
while backward continues, and the update comes last. Every other exchange is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from typing_extensions import override

from deepspeed.accelerator.devices import Device
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.parallel.pipe.schedule.lists import splits_backward
from deepspeed.parallel.pipe.schedule.simulate import Times
from deepspeed.plan.decoder import DecoderShape
from deepspeed.plan.machine import Machine, unknown_rates
from deepspeed.plan.pipeline import Pipeline, idle_time
from deepspeed.plan.prediction.block import BlockCost, BlockTimes, WorkTimes
from deepspeed.plan.prediction.device_model import DeviceModel
from deepspeed.plan.prediction.layout import ParallelLayout
from deepspeed.plan.prediction.network_model import NetworkModel
from deepspeed.plan.prediction.step_bounds import layout_bounds
from deepspeed.plan.prediction.step_memory import MemoryParts, StageState, StepMemory
from deepspeed.plan.prediction.step_times import StepTimes
from deepspeed.plan.times import refuse_below_bounds

ERROR = 0.10
"""Relative error that is stated with a prediction. On published runs that took no part in fitting the median is about
half of it (``benchmarks/scale.py``), but their errors were seen while the model was chosen."""
_UPDATE_BYTES = 30  # per element: gradient, master weight and two states are read, the latter written, weights in bf16
_FILE_BYTES = 12  # per element of states in files: master weight and two states, read and written
_STORED_BYTES = 14  # per element of parameters that come from the device into host memory, rounded and copied there
_UPDATE_LAUNCHES = 100
_MOST_COMPUTATIONS = 40_000  # of a schedule that is simulated; longer ones take the formula
_MUCH = 1e6  # speed-up that makes a cost negligible


@dataclass(frozen=True)
class StepSetup:
    """A model, how ranks share it, and the machine: what :func:`predict_step` needs."""

    shape: DecoderShape  # the model
    layout: ParallelLayout  # how ranks share the model and the batch
    machine: Machine  # where they run
    tokens: int  # tokens of a sample

    @property
    def model_flops(self) -> float:
        """Operations of a step on all ranks, recomputation left out and attention counted as if it were not causal.

        For each token that is 2 operations per parameter of a matrix forward and 4 backward, as publications count.
        """
        shape = self.shape
        experts = shape.experts_per_token if shape.experts else 1
        block = shape.attention_parameters + experts * shape.expert_parameters
        scores = 12 * shape.layers * shape.heads * shape.width_of_head * self.tokens
        return self.layout.samples * self.tokens * (6 * (shape.layers * block + shape.vocab * shape.hidden) + scores)


@dataclass(frozen=True, kw_only=True)
class PredictedStep(StepTimes):
    """The times of the busiest stage, and the memory of the stage that needs most."""

    setup: StepSetup  # what was predicted
    flops: float  # operations of a rank, including recomputation
    device_bytes: float  # peak of bytes that the device's allocator reserves
    state_bytes: float  # parameters, gradients and optimizer states in that sum
    activation_bytes: float  # activations kept for backward in that sum, except logits
    memory: MemoryParts = field(default_factory=MemoryParts)  # the bytes of that stage, by part

    @property
    def tokens(self) -> int:
        """Tokens of a step over all ranks."""
        return self.setup.layout.samples * self.setup.tokens

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all ranks."""
        return self.tokens / self.seconds

    @property
    def model_flops(self) -> float:
        """Operations of :attr:`StepSetup.model_flops` per second and rank."""
        return self.setup.model_flops / self.seconds / self.setup.layout.ranks

    @property
    def lower_bounds(self) -> dict[str, float]:
        """Seconds that each resource is busy, at least: no step can be faster than the longest of them."""
        setup = self.setup
        return layout_bounds(setup.shape, setup.layout, setup.machine, setup.tokens)

    @property
    def fits(self) -> bool:
        """True where ``needed_bytes`` are within the device's memory."""
        return self.needed_bytes <= self.setup.machine.device_memory

    @property
    def needed_bytes(self) -> float:
        """Bytes that a device must have: tensors, and other memory where it exceeds the headroom."""
        machine = self.setup.machine
        return self.memory.needed(machine.headroom * machine.device_memory)

    @override
    def to_dict(self) -> dict[str, Any]:
        return {
            "layout": self.setup.layout.describe(),
            **super().to_dict(),
            "step_seconds_error": ERROR,
            "step_seconds_at_least": max(self.lower_bounds.values()),
            "tokens_per_second": self.tokens_per_second,
            "model_flops_per_second_and_device": self.model_flops,
            "device_bytes": int(self.device_bytes),
            "state_bytes": int(self.state_bytes),
            "activation_bytes": int(self.activation_bytes),
            "memory_bytes": {name: int(nbytes) for name, nbytes in self.memory.rows()},
            "needed_bytes": int(self.needed_bytes),
            "fits": self.fits,
        }


def layers_of_chunks(layers: int, chunks: int, lighter_ends: int | None = None) -> list[int]:
    """Returns the layers of each chunk, fewer at the ends; raises DeepSpeedConfigError where they do not divide so."""
    if layers < chunks:
        raise DeepSpeedConfigError(
            f"{layers} layers cannot be divided among {chunks} chunks; choose fewer stages or chunks"
        )
    if lighter_ends is not None and chunks > 1:
        each, left = divmod(layers + 2 * lighter_ends, chunks)
        if left or each <= lighter_ends:
            raise DeepSpeedConfigError(
                f"lighter_ends={lighter_ends}: {layers} layers and {2 * lighter_ends} more are not a multiple of "
                f"{chunks} chunks with layers left at the ends; choose another number, or leave it out"
            )
        return [each - lighter_ends, *[each] * (chunks - 2), each - lighter_ends]
    counts = [-(-layers // chunks)] * chunks
    missing = sum(counts) - layers
    from_ends = [place for pair in zip(range(chunks - 1, -1, -1), range(chunks), strict=True) for place in pair]
    for place in list(dict.fromkeys(from_ends))[:missing]:
        counts[place] -= 1
    return counts


@dataclass(frozen=True)
class LayerTimes:
    """Waits for the exchanges of stage 3 in one pass through the blocks of a chunk, in seconds."""

    before: float = 0.0  # before the first block
    between: float = 0.0  # between two blocks
    after: float = 0.0  # after the last block
    total: float = 0.0


@dataclass(frozen=True)
class ChunkTimes:
    """The layers of a chunk, for one micro-batch."""

    parts: tuple[tuple[str, BlockTimes, int], ...]  # its parts in the order of a forward, with the number of each
    forward: WorkTimes
    backward: WorkTimes  # whole backward
    weight: float  # seconds of that backward that compute gradients of weights
    host: tuple[float, float]  # waits for the host in forward and in backward, in seconds
    layer_waits: tuple[LayerTimes, LayerTimes]  # waits of stage 3 in forward and in backward

    @property
    def times(self) -> Times:
        """Seconds of a schedule's computations."""
        return Times(self.forward.seconds + self.host[0], self.backward.seconds + self.host[1], self.weight)


@dataclass(frozen=True)
class DataExchangeTimes:
    """Exchanges along the data axis, in seconds: of a block at stage 3, of a whole step at the other stages."""

    gather: float = 0.0  # the gather of parameters
    reduce: float = 0.0  # the reduction of gradients
    gather_wait: float = 0.0  # the part of ``gather`` that computation waits for; not used for a block
    reduce_wait: float = 0.0
    is_beside: bool = True  # they overlap with computation, which they slow down


class StepModel:
    """Predicts one step; quickly with a formula for the idle time of a pipeline instead of a simulated schedule."""

    def __init__(self, setup: StepSetup, *, is_quick: bool = False) -> None:
        self._setup, self._is_quick = setup, is_quick
        self._layout, self._shape = setup.layout, setup.shape
        self._device = DeviceModel(setup.machine.device)
        self._network = NetworkModel(setup.machine)
        cost = BlockCost(setup.shape, setup.layout, self._device, self._network, setup.tokens)
        self._block, self._first, self._last = cost.block(), cost.embedding(), cost.head()
        self._pipeline = Pipeline(
            self._layout.pipe, self._layout.schedule, self._layout.chunks if self._layout.chunks > 1 else None
        )
        self._counts = layers_of_chunks(setup.shape.layers, len(self._pipeline.stage_of), setup.layout.lighter_ends)
        self._memory = StepMemory(self._layout, self._pipeline, self._counts, self._block, self._first, self._last)

    @property
    def least_bytes(self) -> float:
        """Bytes of the states on the stage that has most: the step needs at least these."""
        return self._memory.least

    @property
    def pipeline(self) -> Pipeline:
        """Stages and schedule."""
        return self._pipeline

    def predict(self) -> PredictedStep:
        """Returns the predicted step."""
        chunks, stages = self.chunks(), self.stages()
        busy = self.busy(chunks)
        critical = max(range(len(stages)), key=busy.__getitem__)
        own = [chunks[place] for place in stages[critical].chunks]
        count = self._layout.accumulation
        total = WorkTimes()
        for chunk in own:
            total = total.plus(chunk.forward, count).plus(chunk.backward, count)
        host = count * sum(sum(chunk.host) for chunk in own)
        exposed = dict(total.exposed)
        data = self.data_exchanges(stages[critical], chunks)
        exposed["data"] = exposed.get("data", 0.0) + sum(self.data_costs(data))
        bubble = self._bubble(chunks, busy, critical)
        memory = self._memory.parts()
        return PredictedStep(
            setup=self._setup,
            matmul=total.matmul,
            attention=total.attention,
            traffic=total.traffic,
            exposed={axis: seconds for axis, seconds in exposed.items() if seconds > 0},
            host=host,
            bubble=bubble,
            update=self.update_seconds(max(stages, key=lambda s: s.parameters)),
            flops=total.flops,
            device_bytes=memory.reserved,
            state_bytes=memory.states,
            activation_bytes=memory.tensors["activations"],
            memory=memory,
        )

    # -- chunks and stages -------------------------------------------------------------------------------------------

    def chunks(self) -> list[ChunkTimes]:
        """Returns the chunks of the model, in order."""
        last = len(self._counts) - 1
        known: dict[tuple[int, bool, bool], ChunkTimes] = {}
        found = []
        for place, layers in enumerate(self._counts):
            key = (layers, place == 0, place == last)
            if key not in known:
                known[key] = self._chunk(place)
            found.append(known[key])
        return found

    def busy(self, chunks: Sequence[ChunkTimes]) -> list[float]:
        """Returns the seconds of one micro-batch on each stage."""
        times = [chunk.times for chunk in chunks]
        return [sum(times[place].forward + times[place].backward for place in stage.chunks) for stage in self.stages()]

    def _chunk(self, place: int) -> ChunkTimes:
        parts = [("block", self._block, self._counts[place])]
        if place == 0:
            parts.insert(0, ("embedding", self._first, 1))
        if place == len(self._counts) - 1:
            parts.append(("head and loss", self._last, 1))
        forward, backward, weight = WorkTimes(), WorkTimes(), 0.0
        host = [0.0, 0.0]
        for _, part, times in parts:
            forward, backward = forward.plus(part.forward, times), backward.plus(part.backward, times)
            weight += times * part.weight
            for which, work in enumerate((part.forward, part.backward)):
                host[which] += times * self.host_wait(work)
        waits = LayerTimes(), LayerTimes()
        if self._layout.stage == 3:
            waits = self._add_gathers(forward, backward, self._counts[place])
        return ChunkTimes(tuple(parts), forward, backward, weight, (host[0], host[1]), waits)

    def host_wait(self, work: WorkTimes) -> float:
        """Returns the seconds in which the device waits for the host, which starts its operations too slowly."""
        return max(0.0, work.launches * self._setup.machine.device.efficiency.launch - work.seconds)

    def layer_exchanges(self) -> DataExchangeTimes | None:
        """Returns the exchanges that stage 3 makes for each block; None at other stages."""
        layout, block = self._layout, self._block
        if layout.stage != 3:
            return None
        dense, experts = block.parameters - block.expert_parameters, block.expert_parameters
        gather = self._network.gather(2 * dense, layout.weight_group)
        gather += self._network.gather(2 * experts, layout.expert_weight_group)
        if layout.offload_parameters and (link := self._setup.machine.device.host_link) > 0:
            # until a rank's shard of a block is on the device; the next one is copied meanwhile
            nbytes = 2 * dense / layout.weight_shards
            gather = max(gather, nbytes / link, self._seconds_of_files(nbytes))
        return DataExchangeTimes(gather, self._reduction(dense, experts))

    def _reduction(self, dense: float, experts: float) -> float:
        """Returns the seconds in which ranks sum gradients of these elements, each rank those of its shard."""
        layout, network, width = self._layout, self._network, self._layout.gradient_bytes
        seconds = 0.0
        for elements, shards, replicas in (
            (dense, layout.shard_group, layout.replica_group),
            (experts, layout.expert_shard_group, layout.expert_replica_group),
        ):
            if layout.stage == 0:
                seconds += network.all_reduce(width * elements, shards)
            else:
                seconds += network.gather(width * elements, shards)
            seconds += network.all_reduce(width * elements / (shards.size if layout.stage else 1), replicas)
        return seconds

    def _seconds_of_files(self, nbytes: float) -> float:
        """Returns the seconds in which the disk of a node reads or writes this many bytes of each rank's parameters."""
        layout, machine = self._layout, self._setup.machine
        if layout.most_in_host is None:
            return 0.0
        own = self._setup.shape.parameters / layout.tensor / layout.shards
        return max(0.0, 1 - layout.most_in_host / own) * nbytes * machine.devices_per_node / machine.disk

    def _add_gathers(self, forward: WorkTimes, backward: WorkTimes, layers: int) -> tuple[LayerTimes, LayerTimes]:
        """Adds the exchanges of stage 3, which gathers a layer ahead and reduces the gradients of the layer before."""
        each = self.layer_exchanges()
        assert each is not None
        gather, both = each.gather, each.gather + each.reduce
        there = max(0.0, gather - self._block.forward.seconds)
        back = max(0.0, both - self._block.backward.seconds)
        waits = (
            LayerTimes(before=gather, between=there, total=gather + max(0, layers - 1) * there),
            LayerTimes(between=back, after=each.reduce, total=layers * back + each.reduce),
        )
        forward.wait_along("data", self._cost_beside(layers * gather, waits[0].total), layers * gather)
        backward.wait_along("data", self._cost_beside(layers * both, waits[1].total), layers * both)
        return waits

    def data_costs(self, data: DataExchangeTimes) -> tuple[float, float]:
        """Returns the seconds that a step takes longer by its gather of parameters and its reduction of gradients."""
        if not data.is_beside:
            return data.gather_wait, data.reduce_wait
        return self._cost_beside(data.gather, data.gather_wait), self._cost_beside(data.reduce, data.reduce_wait)

    def _cost_beside(self, exchanged: float, waits: float) -> float:
        """Returns seconds of exposed collectives: ``waits``, and the slowdown beside the rest of ``exchanged``."""
        waits = min(waits, exchanged)
        return waits + self._network.slowdown(exchanged, waits)

    def stages(self) -> list[StageState]:
        """Returns the stages of the pipeline, in order."""
        return self._memory.stages

    # -- once per step -----------------------------------------------------------------------------------------------

    def data_exchanges(self, stage: StageState, chunks: Sequence[ChunkTimes]) -> DataExchangeTimes:
        """Returns the exchanges of a step; at stage 3 layers have their own, and only copies of shards are gathered."""
        layout, network = self._layout, self._network
        dense, experts = stage.parameters - stage.experts, stage.experts
        if layout.stage == 3 and layout.weight_copies.size > 1:
            gather = network.gather(2 * dense / layout.weight_shards, layout.weight_copies)
            gather += network.gather(2 * experts / layout.expert_weight_group.size, layout.expert_weight_copies)
            return DataExchangeTimes(gather, 0.0, gather, 0.0, is_beside=False)
        if layout.stage == 3 or layout.shard_group.size * layout.replica_group.size == 1:
            return DataExchangeTimes()
        reduce, gather = self._reduction(dense, experts), 0.0
        if layout.stage:
            gather = network.gather(2 * dense, layout.shard_group)
            gather += network.gather(2 * experts, layout.expert_shard_group)
        if not layout.overlaps_data:
            return DataExchangeTimes(gather, reduce, gather, reduce, is_beside=False)
        layers = sum(self._counts[place] for place in stage.chunks)
        backward, forward = (
            sum(work.seconds for work in works)
            for works in zip(*((chunks[place].backward, chunks[place].forward) for place in stage.chunks), strict=True)
        )
        gather_wait = max(gather / layers, gather - forward) if layout.overlaps_gather else gather
        return DataExchangeTimes(gather, reduce, gather_wait, max(reduce / layers, reduce - backward))

    def update_seconds(self, stage: StageState) -> float:
        """Returns the seconds of the update on a stage."""
        layout, machine = self._layout, self._setup.machine
        each = (stage.parameters - stage.experts) / layout.shards + stage.experts / layout.expert_shards
        link_rate = machine.device.host_link
        if layout.offload:
            host = each * _UPDATE_BYTES / machine.host_bandwidth
            link = each * (2 + layout.gradient_bytes) / link_rate if link_rate else 0.0
            files = 2 * each * _FILE_BYTES * machine.devices_per_node / machine.disk if layout.states_on_disk else 0.0
            return host + link + files + self._seconds_of_files(2 * each)
        down = 0.0
        if layout.offload_parameters:  # updated on the device, rounded to 16 bits and stored by the host
            down = each * _STORED_BYTES / machine.host_bandwidth + (2 * each / link_rate if link_rate else 0.0)
            down += self._seconds_of_files(2 * each)
        read = layout.gradient_bytes * (stage.parameters / (layout.shards if layout.stage >= 2 else 1))
        return (
            self._device.traffic(each * _UPDATE_BYTES + read)
            + _UPDATE_LAUNCHES * machine.device.efficiency.launch
            + down
        )

    def _bubble(self, chunks: Sequence[ChunkTimes], busy: Sequence[float], critical: int) -> float:
        layout, count = self._layout, self._layout.accumulation
        if layout.pipe == 1:
            return 0.0
        if self._is_quick or layout.pipe * layout.chunks * min(count, 8 * layout.pipe) > _MOST_COMPUTATIONS:
            mean = sum(busy) / len(busy)
            hops = 2 * (layout.pipe - 1) * self._transfer
            if splits_backward(layout.schedule):
                mean /= 3
            return (layout.pipe - 1) / layout.chunks * mean + hops
        times = dict(enumerate(self.schedule_times(chunks)))
        return max(0.0, idle_time(self._pipeline, times, count).seconds - count * busy[critical])

    @property
    def _transfer(self) -> float:
        """Seconds from the end of a computation until the next stage has its result."""
        layout = self._layout
        if layout.pipe == 1:
            return 0.0
        tensor = layout.tensor if layout.cuts_norms else 1
        nbytes = 2 * layout.micro_batch * self._setup.tokens / layout.context * self._shape.hidden / tensor
        return self._network.send(nbytes, layout.stage_stride)

    def schedule_times(self, chunks: Sequence[ChunkTimes]) -> list[Times]:
        """Returns the seconds of the schedule's computations, by chunk."""
        return [replace(chunk.times, transfer=self._transfer) for chunk in chunks]


def predict_step(setup: StepSetup, *, is_quick: bool = False) -> PredictedStep:
    """Predicts a step of a decoder; quickly with a formula for the idle time of a pipeline.

    Raises:
        DeepSpeedConfigError: The layers, heads, experts or tokens cannot be divided so, the layout has other ranks than
            the machine, or the device's rates are not known.
        DeepSpeedError: The prediction is below one of its lower bounds. Not checked if ``is_quick``.
    """
    refuse_unknown_rates(setup.machine)
    _refuse_uneven(setup)
    if setup.layout.ranks != setup.machine.ranks:
        raise DeepSpeedConfigError(
            f"the layout ({setup.layout.describe()}) is one of {setup.layout.ranks} ranks, but the machine has "
            f"{setup.machine.ranks}; change the degrees or the number of nodes"
        )
    step = StepModel(setup, is_quick=is_quick).predict()
    if not is_quick:
        refuse_below_bounds(step.seconds, step.lower_bounds, setup.layout.describe())
    return step


def refuse_unknown_rates(machine: Machine) -> None:
    """Raises DeepSpeedConfigError if a rate that predicted times need is unknown."""
    if unknown := unknown_rates(machine):
        raise DeepSpeedConfigError(
            f"device {machine.device.name!r}: no time can be predicted, as these are not known: {', '.join(unknown)}; "
            "choose a device of the table (--device), or give its figures in a file (--machine)"
        )


def _refuse_uneven(setup: StepSetup) -> None:
    shape, layout, tokens = setup.shape, setup.layout, setup.tokens
    if shape.heads % layout.tensor:
        raise DeepSpeedConfigError(
            f"tensor={layout.tensor}: must divide the {shape.heads} attention heads; choose a divisor"
        )
    if tokens % layout.context:
        raise DeepSpeedConfigError(
            f"context={layout.context}: must divide the {tokens} tokens of a sample; choose a divisor, or another "
            "--sequence-length"
        )
    if not layout.is_ring and shape.heads % (layout.tensor * layout.context):
        raise DeepSpeedConfigError(
            f"sequence={layout.context}: exchanges tokens for heads, of which each rank has "
            f"{shape.heads // layout.tensor}; choose a divisor of that, or a ring (--context)"
        )
    if layout.experts > 1 and (not shape.experts or shape.experts % layout.experts):
        raise DeepSpeedConfigError(
            f"ep={layout.experts}: must divide the number of experts ({shape.experts}); choose a divisor, or leave ep "
            "out"
        )


def costs_turned_off(step: PredictedStep) -> list[tuple[str, float]]:
    """Returns possible improvements and the seconds that each would save, the largest first."""
    return _savings(step, [(name, predict_step(change(step.setup))) for name, change in (*_SETTINGS, *_LIMITS)])


def settings_that_help(step: PredictedStep) -> list[tuple[str, float]]:
    """Returns those of :func:`costs_turned_off` that need no other machine and still fit."""
    changed = [(name, predict_step(change(step.setup))) for name, change in _SETTINGS]
    return _savings(step, [(name, other) for name, other in changed if other.fits])


def _savings(step: PredictedStep, changed: list[tuple[str, PredictedStep]]) -> list[tuple[str, float]]:
    found = [(name, step.seconds - other.seconds) for name, other in changed]
    if step.bubble > 0:
        found.append(("no waiting for other stages (more micro-batches, more chunks, another schedule)", step.bubble))
    if step.update > 0:
        found.append(("no update (states over more ranks)", step.update))
    return sorted(((name, saved) for name, saved in found if saved > 0.002 * step.seconds), key=lambda row: -row[1])


def _with_device(setup: StepSetup, change: Callable[[Device], Device]) -> StepSetup:
    return replace(setup, machine=replace(setup.machine, device=change(setup.machine.device)))


def _endless_links(setup: StepSetup) -> StepSetup:
    machine = replace(setup.machine, network=setup.machine.network * _MUCH)
    return replace(setup, machine=replace(machine, device=replace(machine.device, link=machine.device.link * _MUCH)))


_SETTINGS: tuple[tuple[str, Callable[[StepSetup], StepSetup]], ...] = (
    ("no recomputation (more memory)", lambda s: replace(s, layout=replace(s.layout, recompute="none"))),
    ("fused elementwise operations (compile)", lambda s: replace(s, layout=replace(s.layout, is_compiled=True))),
    ("a fused loss", lambda s: replace(s, layout=replace(s.layout, has_fused_loss=True))),
    ("linear layers in fp8", lambda s: replace(s, layout=replace(s.layout, is_fp8=True))),
    (
        "norms cut along the sequence (tensor_parallel.sequence_parallel_norms)",
        lambda s: replace(s, layout=replace(s.layout, cuts_norms=s.layout.tensor > 1)),
    ),
)
_LIMITS: tuple[tuple[str, Callable[[StepSetup], StepSetup]], ...] = (
    ("links and network without limit", _endless_links),
    (
        "memory bandwidth without limit",
        lambda s: _with_device(s, lambda d: replace(d, memory_bandwidth=d.memory_bandwidth * _MUCH)),
    ),
    (
        "a host without cost per operation",
        lambda s: _with_device(s, lambda d: replace(d, efficiency=replace(d.efficiency, launch=0.0))),
    ),
)
