"""``parallel.pipe.interpreter``: the stages of a pipeline as threads of one process, over queues."""

import queue
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from deepspeed.errors import PipelineError
from deepspeed.parallel.pipe.channel import ACTIVATIONS
from deepspeed.parallel.pipe.interpreter import METHOD_OF_INSTRUCTION, Interpreter
from deepspeed.parallel.pipe.schedule import lists, make_schedule, training_steps
from deepspeed.parallel.pipe.split import backward_to_inputs

COUNT = 4
HOST = torch.device("cpu")


class FakeWires:
    """Channels of one stage over queues that all stages share."""

    def __init__(self, stage: int, queues: dict[Any, queue.Queue[Any]], events: list[str]) -> None:
        self.stage = stage
        self.expected: Counter[tuple[str, int]] = Counter()
        self._queues = queues
        self._events = events

    def incoming(self, kind: str, peer: int) -> Any:
        return _Incoming(self, kind, peer)

    def outgoing(self, kind: str, peer: int) -> Any:
        return _Outgoing(self, kind, peer)

    def drain(self) -> None:
        self._events.append("drain")

    def batch(self) -> AbstractContextManager[None]:
        return nullcontext()


@dataclass
class _Incoming:
    transports: FakeWires
    kind: str
    peer: int

    def expect(self, count: int) -> None:
        self.transports.expected[self.kind, self.peer] += count

    def take(self, micro_batch: int) -> Any:
        sent, value = self.transports._queues[self.kind, self.peer, self.transports.stage].get(timeout=60)
        assert sent == micro_batch, "messages of a kind arrive in the order in which they were sent"
        if self.kind != ACTIVATIONS:
            return value
        if isinstance(value, tuple):
            return value[0].detach().requires_grad_(), value[1]
        return value.detach().requires_grad_()


@dataclass
class _Outgoing:
    transports: FakeWires
    kind: str
    peer: int

    def send(self, micro_batch: int, value: Any) -> None:
        self.transports._events.append(f"send {micro_batch}")
        self.transports._queues[self.kind, self.transports.stage, self.peer].put((micro_batch, value))


@dataclass
class FakeCompute:
    """Chunks ``x -> x * weight``; the last one returns the sum as the loss, divided by the micro-batches."""

    chunks: dict[int, torch.Tensor]
    last: int
    items: list[Any]
    sends_labels: bool = False
    begins: bool = True
    fails_at: int = -1
    events: list[str] = field(default_factory=list)
    left: list[tuple[int, int]] = field(default_factory=list)
    labels: list[Any] = field(default_factory=list)
    backwards_left: Counter[int] = field(default_factory=Counter)

    def begin_step(self, backwards: Mapping[int, int]) -> None:
        self.backwards_left = Counter(backwards)

    def own_items(self) -> list[Any]:
        return list(self.items)

    def may_begin(self) -> bool:
        return self.begins and bool(self.items) and self.items[0][0] is not None

    def agree(self) -> bool:
        self.events.append("agree")
        return self.sends_labels

    def compute_forward(self, chunk: int, micro_batch: int, inputs: Any, labels: Any) -> Any:
        self.events.append(f"forward {micro_batch}")
        if micro_batch == self.fails_at:
            raise ValueError("a layer failed")
        outputs = inputs * self.chunks[chunk]
        if chunk != self.last:
            return outputs
        self.labels.append(labels)
        return outputs.sum() / COUNT

    def compute_backward(self, chunk: int, micro_batch: int, outputs: Any, gradients: Any) -> None:
        self.events.append(f"backward {micro_batch}")
        self._count_down(chunk)
        torch.autograd.backward(outputs, gradients)

    def compute_input_gradients(self, chunk: int, micro_batch: int, outputs: Any, gradients: Any, inputs: Any) -> Any:
        self.events.append(f"input {micro_batch}")
        if not inputs:
            return outputs, gradients
        roots = outputs if gradients is not None else [outputs[0]]
        return backward_to_inputs(roots, gradients or [torch.ones_like(outputs[0])], inputs)

    def compute_weight_gradients(self, chunk: int, micro_batch: int, work: Any) -> None:
        self.events.append(f"weight {micro_batch}")
        self._count_down(chunk)
        if isinstance(work, tuple):
            torch.autograd.backward(*work)
        elif work is not None:
            work.run()

    def _count_down(self, chunk: int) -> None:
        self.backwards_left[chunk] -= 1
        self.left.append((chunk, self.backwards_left[chunk]))

    def update(self) -> None:
        self.events.append("update")


def _inputs() -> list[torch.Tensor]:
    return [torch.arange(3.0) + micro_batch for micro_batch in range(COUNT)]


def _run(name: str, stages: int, **options: Any) -> tuple[list[FakeCompute], list[Interpreter]]:
    """Runs one training step of every stage, each in a thread."""
    chunks = 2 if name in ("interleaved", "zbv", "dualpipev") else 1
    schedule = make_schedule(name, stages, COUNT, chunks)
    stage_of = tuple(schedule.stage_of)
    weights = [torch.tensor(2.0 + chunk, requires_grad=True) for chunk in range(len(stage_of))]
    queues: dict[Any, queue.Queue[Any]] = defaultdict(queue.Queue)
    computes, interpreters = [], []
    for stage in range(stages):
        own = {chunk: weights[chunk] for chunk, owner in enumerate(stage_of) if owner == stage}
        items: list[Any] = []
        if 0 in own or len(stage_of) - 1 in own:
            items = [(value, number) for number, value in enumerate(_inputs())]
        if 0 not in own and options.get("sends_labels"):
            items = [(None, None)] * len(items)
        compute = FakeCompute(own, len(stage_of) - 1, items, **options)
        transports: Any = FakeWires(stage, queues, compute.events)
        computes.append(compute)
        interpreters.append(Interpreter(transports, stage_of, HOST, compute))
    with ThreadPoolExecutor(stages) as threads:
        runs = [
            threads.submit(interpreter.run, training_steps(name, stages, COUNT, chunks, stage))
            for stage, interpreter in enumerate(interpreters)
        ]
        for run in runs:
            run.result(timeout=60)
    return computes, interpreters


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "dualpipev"])
def test_gradients_are_those_of_the_whole_model(name):
    computes, interpreters = _run(name, 2)
    found = {chunk: weight for compute in computes for chunk, weight in compute.chunks.items()}
    same = [torch.tensor(2.0 + chunk, requires_grad=True) for chunk in range(len(found))]
    for value in _inputs():
        for weight in same:
            value = value * weight
        (value.sum() / COUNT).backward()
    for chunk, weight in enumerate(same):
        torch.testing.assert_close(found[chunk].grad, weight.grad)
    for compute, interpreter in zip(computes, interpreters, strict=True):
        assert compute.events[-2:] == ["update", "drain"]
        assert [left for chunk, left in compute.left if chunk == min(compute.chunks)] == [3, 2, 1, 0]
        assert not any(compute.backwards_left.values())
        assert not any(interpreter.pipe_buffers.values()), "buffers are freed at the end of a step"
        assert not interpreter._handed


def test_first_forwards_come_before_the_agreement_and_nothing_is_sent():
    computes, interpreters = _run("1f1b", 2)
    first = computes[0].events
    assert first[0] == "forward 0"
    assert first.index("agree") < first.index("send 0")
    assert computes[1].events[0] == "agree", "the last stage computes nothing without the first"
    assert interpreters[1].channels.expected == {(ACTIVATIONS, 0): COUNT}
    later, _ = _run("1f1b", 2, begins=False)
    assert later[0].events[0] == "agree"


@pytest.mark.parametrize("sends_labels", [False, True])
def test_labels_reach_the_last_stage(sends_labels):
    computes, _ = _run("1f1b", 3, sends_labels=sends_labels)
    assert computes[2].labels == list(range(COUNT))


def _alone(**options: Any) -> tuple[FakeCompute, Interpreter]:
    compute = FakeCompute({0: torch.tensor(2.0, requires_grad=True)}, 0, [(v, 0) for v in _inputs()], **options)
    transports: Any = FakeWires(0, defaultdict(queue.Queue), compute.events)
    return compute, Interpreter(transports, (0,), HOST, compute)


def test_a_failure_names_the_instruction_and_frees_the_buffers():
    compute, interpreter = _alone(fails_at=2)
    with pytest.raises(ValueError, match="a layer failed"):
        interpreter.run(training_steps("1f1b", 1, COUNT, 1, 0))
    assert isinstance(interpreter.at, lists.ForwardPass)
    assert interpreter.at.describe() == "forward of micro-batch 2"
    assert not any(interpreter.pipe_buffers.values())
    assert "update" not in compute.events


def test_instructions_of_the_program():
    class Note(lists.PipeInstruction):
        pass

    compute, interpreter = _alone()
    with pytest.raises(PipelineError, match=r"expected instructions.*Note\(text='a'\)"):
        interpreter.run([[Note(text="a")]])
    heard: list[str] = []
    own: dict[type, Callable[..., None]] = {
        Note: lambda text: heard.append(text),
        lists.OptimizerStep: lambda: heard.append("own update"),
    }
    steps = [[Note(text="a")], *training_steps("1f1b", 1, COUNT, 1, 0)]
    interpreter.run(steps, own)
    assert heard == ["a", "own update"]
    assert "update" not in compute.events


def test_handlers_can_be_measured():
    compute, interpreter = _alone()
    seen: Counter[type] = Counter()

    def wrap(kind: type, handler: Callable[..., None]) -> Callable[..., None]:
        def measured(**arguments: Any) -> None:
            seen[kind] += 1
            handler(**arguments)

        return measured

    interpreter.wrap_handlers(wrap)
    interpreter.run(training_steps("1f1b", 1, COUNT, 1, 0))
    assert seen[lists.ForwardPass] == seen[lists.BackwardPass] == COUNT
    assert seen[lists.OptimizerStep] == 1
    assert compute.events.count("update") == 1


def test_every_instruction_has_a_method():
    published = {
        kind for kind in vars(lists).values() if isinstance(kind, type) and issubclass(kind, lists.PipeInstruction)
    } - {lists.PipeInstruction, lists.BufferOpInstruction}
    assert published == set(METHOD_OF_INSTRUCTION)
    assert all(callable(getattr(Interpreter, name)) for name in METHOD_OF_INSTRUCTION.values())
