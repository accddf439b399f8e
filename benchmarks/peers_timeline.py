"""Predicts a step of FSDP2 and DDP on the timeline of ``ds_plan``, beside a step of this project.

The code of FSDP2 and DDP runs unchanged on tensors without values, as a rank of torch's fake process group. A dispatch
mode records their operations and collectives, a device module records their streams and events. The same replay
computes the times of both sides, which differ only in the operations that each issues, their streams, and the waits.

Run: ``python -m benchmarks.peers_timeline [--out FILE]``.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

import deepspeed
from deepspeed.nested import tensors_of
from deepspeed.plan import DecoderShape
from deepspeed.plan.decoder import Decoder
from deepspeed.plan.machine import Machine
from deepspeed.plan.memory import META
from deepspeed.plan.timeline.operation_cost import OperationCost, OperationKind
from deepspeed.plan.timeline.step_trace import (
    COMPUTE_STREAM,
    MarkEvent,
    OperationEvent,
    StepRecording,
    StreamRecordEvent,
    StreamWaitEvent,
    TraceEvent,
    WaitEvent,
)
from deepspeed.plan.timeline.timed_step import TimedStep, time_step
from deepspeed.plan.values import OperationCount
from deepspeed.torch_private import storage_key

LLAMA_8B = DecoderShape(layers=32, hidden=4096, heads=32, kv_heads=8, intermediate=14336, vocab=128256)
LLAMA_70B = DecoderShape(layers=80, hidden=8192, heads=64, kv_heads=8, intermediate=28672, vocab=128256)
GPT_1B = DecoderShape(layers=24, hidden=2048, heads=16, vocab=50304, is_gated=False)
_COLLECTIVES = {
    "c10d::_allgather_base_": "all_gather",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::allreduce_": "all_reduce",
}


@dataclass(frozen=True)
class PeerCase:
    """A training that both sides run.

    Attributes:
        name: In the table.
        shape: The decoder.
        stage: ZeRO stage of this project.
        peer: ``fsdp2`` or ``ddp``.
        micro_batch: Samples per rank.
        sequence_length: Tokens of a sample.
        checkpointing: Whether blocks save only their inputs.
    """

    name: str
    shape: DecoderShape
    stage: int
    peer: str
    micro_batch: int = 1
    sequence_length: int = 4096
    checkpointing: bool = False

    def config(self) -> dict[str, Any]:
        """Returns the configuration of this project."""
        return {
            "train_micro_batch_size_per_gpu": self.micro_batch,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": {"stage": self.stage},
        }


CASES = (
    PeerCase("Llama 8B", LLAMA_8B, 3, "fsdp2"),
    PeerCase("Llama 8B, 1,024 tokens", LLAMA_8B, 3, "fsdp2", sequence_length=1024),
    PeerCase("Llama 70B, recomputed", LLAMA_70B, 3, "fsdp2", checkpointing=True),
    PeerCase("GPT 1.3B", GPT_1B, 3, "fsdp2", micro_batch=4, sequence_length=2048),
    PeerCase("GPT 1.3B", GPT_1B, 0, "ddp", micro_batch=4, sequence_length=2048),
    PeerCase("GPT 1.3B", GPT_1B, 1, "ddp", micro_batch=4, sequence_length=2048),
    PeerCase("GPT 1.3B, 512 tokens", GPT_1B, 0, "ddp", sequence_length=512),
    PeerCase("GPT 1.3B, 512 tokens", GPT_1B, 1, "ddp", sequence_length=512),
)


# -- a device that records ---------------------------------------------------------------------------------------------


class _RecordedEvent:
    """Records where it is recorded, as a ``torch.cuda.Event``."""

    def __init__(self, device: RecordingDevice) -> None:
        self._device = device
        self.number = -1

    def record(self, stream: _RecordedStream | None = None) -> None:
        self.number = next(self._device.numbers)
        recorded = self._device.trace.stream if stream is None else stream.number
        self._device.trace.add(StreamRecordEvent(self.number, recorded))


class _RecordedStream:
    """Records its events and waits, as a ``torch.cuda.Stream``."""

    def __init__(self, device: RecordingDevice, number: int) -> None:
        self._device, self.number = device, number

    def record_event(self) -> _RecordedEvent:
        made = _RecordedEvent(self._device)
        made.record(self)
        return made

    def wait_event(self, event: _RecordedEvent) -> None:
        self._device.trace.add(StreamWaitEvent(event.number, self.number))

    def wait_stream(self, other: _RecordedStream) -> None:
        self.wait_event(other.record_event())


class RecordingDevice:
    """Takes the place of a device module such as ``torch.cuda`` and records its streams and events.

    Args:
        trace: Receives the records.
    """

    def __init__(self, trace: StepRecording) -> None:
        self.trace = trace
        self.numbers = itertools.count()
        self._streams = [_RecordedStream(self, COMPUTE_STREAM)]

    def Stream(self, **_options: Any) -> _RecordedStream:
        """Makes a stream."""
        self._streams.append(_RecordedStream(self, len(self._streams)))
        return self._streams[-1]

    def Event(self, **_options: Any) -> _RecordedEvent:
        """Makes an event."""
        return _RecordedEvent(self)

    def current_stream(self) -> _RecordedStream:
        """Returns the stream to which operations are issued."""
        return self._streams[self.trace.stream]

    @contextmanager
    def stream(self, stream: _RecordedStream) -> Iterator[None]:
        """Issues operations to a stream while the context is open."""
        before, self.trace.stream = self.trace.stream, stream.number
        try:
            yield
        finally:
            self.trace.stream = before

    def current_device(self) -> int:
        """Returns the index of the device."""
        return 0

    def is_initialized(self) -> bool:
        """Returns True."""
        return True


class PeerOperations(OperationCount):
    """Records the operations and collectives of a program that calls ``torch.distributed`` itself.

    Args:
        ranks: Number of ranks of the job.

    Attributes:
        started: Numbers of the all-reduces that computation has not waited for yet.
    """

    def __init__(self, ranks: int) -> None:
        super().__init__("cuda")
        self._ranks = tuple(range(ranks))
        self._numbers_of: dict[int, torch.Tensor] = {}
        self.started: list[int] = []

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor then calls operations of its local tensors, which are recorded
        return super().__torch_dispatch__(func, types, args, kwargs)

    @override
    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, bool | None]:
        name = func._schema.name
        if name in _COLLECTIVES:
            self._note_collective(name, args)
            return func(*args, **kwargs), None
        if name == "fsdp::all_gather_copy_in":  # returns views of its argument
            nbytes = 2 * sum(tensor.numel() * tensor.element_size() for tensor in args[0])
            cost = OperationCost("all_gather_copy_in", OperationKind.TRAFFIC, nbytes=nbytes)
            self.trace.add(OperationEvent(cost, False, self.trace.stream))
            return func(*args, **kwargs), None
        if func is torch.ops.aten.copy_.default and args[0].dtype == torch.int32:
            return self._copy_numbers(func, args), None
        return super().run(func, args, kwargs)

    def wait_for_started(self) -> None:
        """Records that computation waits for all started all-reduces."""
        for number in self.started:
            self.trace.add(WaitEvent(number))
        self.started.clear()

    def _note_collective(self, name: str, args: tuple[Any, ...]) -> None:
        """Records a collective: DDP waits for its all-reduces later, FSDP2 waits in the stream of the collective."""
        nbytes = max(t.numel() * t.element_size() for t in tensors_of(args))
        number = self.trace.start(_COLLECTIVES[name], "data", nbytes, self._ranks)
        if name == "c10d::allreduce_":
            self.started.append(number)
        else:
            self.trace.add(WaitEvent(number, self.trace.stream))

    def _copy_numbers(self, func: Any, args: tuple[Any, ...]) -> Any:
        """Copies integers and keeps their values: DDP's reducer copies its bucket layout to the device and back."""
        target, source = args[0], args[1]
        if target.device.type == "meta" and source.device.type == "cpu":
            self._numbers_of[storage_key(target)] = source.clone()
        elif source.device.type == "meta" and target.device.type == "cpu":
            return target.copy_(self._numbers_of[storage_key(source)])
        return func(*args)


@contextmanager
def peer_environment(ranks: int) -> Iterator[PeerOperations]:
    """Creates torch's fake process group and records operations on tensors without values; ends both on exit.

    Args:
        ranks: Number of ranks of the job; this process is the first.

    Raises:
        RuntimeError: This process has a process group already.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise RuntimeError("peers_timeline: expected no process group, found one; call destroy_process_group() first")
    count = PeerOperations(ranks)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        with ExitStack() as stack:
            for context in (
                mock.patch.object(torch, "meta", RecordingDevice(count.trace), create=True),
                mock.patch.object(FSDPParamGroup, "_validate_no_meta_params"),
                mock.patch.object(import_module("torch.optim.adam"), "_device_dtype_check_for_fused"),
                count.counting(),
            ):
                stack.enter_context(context)
            yield count
    finally:
        dist.destroy_process_group()


# -- the peers ---------------------------------------------------------------------------------------------------------

Mark = Callable[[str], None]
PeerStep = Callable[[Mark, torch.Tensor], None]


def _fsdp2(case: PeerCase, ranks: int, _count: PeerOperations) -> PeerStep:
    """Returns a step of FSDP2, which shards blocks, embedding, and norm with head; fp32 shards, bf16 computation."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    with torch.device(META):
        model = Decoder(case.shape)
    if case.checkpointing:
        model.layers = nn.ModuleList(checkpoint_wrapper(block) for block in model.layers)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    shard = functools.partial(fully_shard, mesh=DeviceMesh("meta", list(range(ranks))), mp_policy=policy)
    shard(model.embedding)
    for block in model.layers:
        shard(block)
    shard([model.norm, model.head], reshard_after_forward=False)  # gathered again at once
    shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(mark: Mark, ids: torch.Tensor) -> None:
        mark("forward")
        loss = model(ids, ids)
        mark("backward")
        loss.backward()
        mark("step")
        optimizer.step()
        optimizer.zero_grad()

    return step


def _ddp(case: PeerCase, _ranks: int, count: PeerOperations) -> PeerStep:
    """Returns a step of DDP, which sums bf16 gradients in buckets of 25 MB and updates fp32 masters."""
    with torch.device(META):
        model = Decoder(case.shape).bfloat16()
    masters = [p.detach().float() for p in model.parameters()]
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, init_sync=False)

    def reduce_bucket(_state, bucket):  # no annotations: DDP compares them, and as text they differ
        # As the reducer's own all-reduce, which divides in its copy. It would read results, which fake works lack.
        dist.all_reduce(bucket.buffer(), async_op=True)
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    wrapped.register_comm_hook(None, reduce_bucket)
    optimizer = torch.optim.AdamW(masters, lr=1e-4, fused=True)
    for master in masters:
        master.grad = torch.empty_like(master)

    def step(mark: Mark, ids: torch.Tensor) -> None:
        mark("forward")
        loss = wrapped(ids, ids)
        mark("backward")
        loss.backward()
        count.wait_for_started()
        mark("step")
        with torch.no_grad():
            weights = list(model.parameters())
            torch._foreach_copy_([master.grad for master in masters], [p.grad for p in weights])
            optimizer.step()
            torch._foreach_copy_(weights, masters)
        model.zero_grad()

    return step


PEERS: dict[str, Callable[[PeerCase, int, PeerOperations], PeerStep]] = {"fsdp2": _fsdp2, "ddp": _ddp}
_STEPS = 3  # DDP rebuilds its buckets in the second; the last is recorded


def record_peer(case: PeerCase, ranks: int) -> Sequence[TraceEvent]:
    """Returns the events of a step of the peer.

    Args:
        case: The training.
        ranks: Number of ranks of the job.
    """
    with peer_environment(ranks) as count:
        step = PEERS[case.peer](case, ranks, count)
        ids = torch.zeros(case.micro_batch, case.sequence_length, dtype=torch.long, device=META)
        for _ in range(_STEPS - 1):
            step(lambda _phase: None, ids)
            count.started.clear()
        with count.trace.recording():
            step(lambda phase: count.trace.add(MarkEvent(phase, 0)), ids)
        return list(count.trace.events)


def predict_both(
    case: PeerCase, nodes: int, devices_per_node: int = 8, *, theirs: TimedStep | None = None, **options: Any
) -> tuple[TimedStep, TimedStep]:
    """Returns the steps of this project and of the peer.

    Args:
        case: The training.
        nodes: Number of nodes.
        devices_per_node: Devices of each node.
        theirs: Step of the peer; None: it is recorded.
        **options: Keywords of :func:`deepspeed.plan`; ``config`` is merged into the configuration.
    """
    config = {**case.config(), **options.pop("config", {})}
    made = deepspeed.plan(
        case.shape,
        config,
        nodes=nodes,
        devices_per_node=devices_per_node,
        sequence_length=case.sequence_length,
        activation_checkpointing=case.checkpointing,
        compare_checkpointing=False,
        suggest=False,
        **options,
    )
    machine: Machine = made.machine
    assert made.timed_step is not None
    if theirs is None:
        theirs = time_step(record_peer(case, machine.ranks), machine, 1, is_asynchronous=True)
    return made.timed_step, theirs


# -- the report --------------------------------------------------------------------------------------------------------


def _cells(step: TimedStep) -> str:
    compute = step.matmul + step.attention + step.traffic
    values = (step.seconds, compute, sum(step.exposed.values()), step.host, step.update)
    return " | ".join(f"{1e3 * value:,.1f}" for value in values)


def report(cases: Sequence[PeerCase], nodes: Sequence[int], device: str) -> str:
    """Returns the table of all cases.

    Args:
        cases: The trainings.
        nodes: Numbers of nodes, each with 8 devices.
        device: Name in the table of devices.
    """
    lines = [
        "# Predicted steps of this project, FSDP2 and DDP",
        "",
        "Made by `python -m benchmarks.peers_timeline --out FILE`; nothing was measured. The code of both sides ran on "
        f"tensors without values under torch {torch.__version__}; the same replay computed the times of both on "
        f"{device} nodes of 8 with 50 GB/s per device between nodes. Milliseconds. Exposed: waits of computation for "
        "collectives, and its slowdown by those that run at the same time. Without the time of Python.",
        "",
        "FSDP2: `fully_shard` on blocks, embedding, and norm with head; fp32 shards, bf16 computation and reduction, "
        "fused AdamW. DDP: bf16 weights and gradients, buckets of 25 MB as views, fp32 masters, fused AdamW.",
        "",
        "| case | devices | ours | peer | ours / peer | ours: step | compute | exposed | host | update | "
        "peer: step | compute | exposed | host | update |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for case, count in itertools.product(cases, nodes):
        ours, theirs = predict_both(case, count, device=device)
        lines.append(
            f"| {case.name} | {8 * count} | stage {case.stage} | {case.peer} | {ours.seconds / theirs.seconds:.3f} | "
            f"{_cells(ours)} | {_cells(theirs)} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--device", default="h100")
    parser.add_argument("--layers", type=int, help="number of layers of every model, instead of its own")
    parser.add_argument("--out", type=Path, help="file for the table")
    options = parser.parse_args()
    cases = CASES
    if options.layers:
        cases = tuple(replace(case, shape=replace(case.shape, layers=options.layers)) for case in CASES)
    text = report(cases, options.nodes, options.device)
    print(text)
    if options.out:
        options.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
