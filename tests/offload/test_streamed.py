"""``offload_optimizer.update: "device"``: the bits of updates on the host, bounded device memory, one copy each way."""

from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch

from deepspeed.offload.streamed import StreamedUpdate
from deepspeed.offload.streams import CopyStream
from deepspeed.zero.update import loop
from tests.config.support import problems
from tests.device.support import batch, engine_at, step
from tests.harness import run_ranks
from tests.harness.device import simulated_device
from tests.offload.test_tiers import assert_same, tiers_of
from tests.offload.training import config, train_each

STREAMED = {"offload_optimizer": {"device": "cpu", "update": "device"}}
CELLS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"stage": 1, "precision": "bf16", "accumulation": 2}, {}),
    ({"stage": 2, "precision": "fp16"}, {}),
    ({"stage": 3, "precision": "fp32"}, {}),
    ({"stage": 3, "precision": "bf16"}, {"offload_param": {"device": "cpu"}}),
]


def test_bits_are_those_without_offload() -> None:
    settings = [config(**cell) for cell, _ in CELLS]
    streamed = [config(**cell, **STREAMED, **more, sub_group_size=1) for cell, more in CELLS]
    for got in run_ranks(train_each, 2, [*settings, *streamed], timeout=120):
        for plain, trained in zip(got, got[len(CELLS) :], strict=False):
            assert_same([trained], [plain])
            assert tiers_of(trained, "master weights") <= {"host"} and tiers_of(trained, "optimizer state") == {"host"}


@pytest.mark.parametrize(("stage", "more"), [(2, {}), (3, {"offload_param": {"device": "cpu"}})])
def test_copies_and_waits_on_a_device(stage: int, more: dict[str, Any]) -> None:
    """Read or write too early is an error there; the next chunk comes up before the update of the last one begins."""
    order: list[str] = []
    nbytes: Counter[str] = Counter()
    read, update, copy = StreamedUpdate._read_next, loop.update_chunk, CopyStream.copy

    def reading(self: Any) -> None:
        order.append("read")
        read(self)

    def updating(*arguments: Any) -> Any:
        operands = arguments[4]
        tensors = operands.master, operands.grad, *operands.states.values()
        assert {tensor.device.type for tensor in tensors} == {"cuda"}
        order.append("update")
        return update(*arguments)

    def copying(self: Any, target: torch.Tensor, source: torch.Tensor) -> Any:
        nbytes["up" if target.device.type == "cuda" else "down"] += source.nbytes
        return copy(self, target, source)

    waits = []
    for section in ({}, {"update": "device"}):
        with simulated_device(ranks=2) as device:
            engine = engine_at(stage, zero={"offload_optimizer": {"device": "cpu", **section}, **more})
            step(engine, 0)
            engine.backward(engine(batch(engine, 1)))
            before = device.clocks.waits
            with (
                mock.patch.object(StreamedUpdate, "_read_next", reading),
                mock.patch.object(loop, "update_chunk", updating if section else update),
                mock.patch.object(CopyStream, "copy", copying if section else copy),
            ):
                engine.step()
            waits.append(device.clocks.waits - before)
            elements = sum(master.flat.numel() for master in engine._runtime.masters)
            step(engine, 2)
            engine.destroy()
    chunks = order.count("update")
    assert chunks > 2 and order == ["read", "read", *["update", "read"] * (chunks - 2), "update", "update"]
    sent = nbytes["up"] / elements, nbytes["down"] / elements
    assert sent == ((16, 12) if stage == 2 else (16, 14)), sent  # with bf16 parameters in host memory
    assert waits[1] <= waits[0] + 1, waits


@pytest.mark.parametrize(
    ("section", "more"),
    [
        ({"device": "nvme", "nvme_path": "/tmp"}, {}),
        ({"device": "cpu", "super_offload": True}, {}),
        ({"device": "cpu"}, {"offload_param": {"device": "nvme", "nvme_path": "/tmp"}}),
    ],
)
def test_what_it_cannot_be_combined_with(section: dict[str, Any], more: dict[str, Any]) -> None:
    zero = {"stage": 3, "offload_optimizer": {**section, "update": "device"}, **more}
    (problem,) = problems({"zero_optimization": zero})
    assert problem.startswith("zero_optimization.offload_optimizer.update: ")
