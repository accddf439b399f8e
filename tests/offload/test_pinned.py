"""What only happens with an accelerator, made to happen on the CPU: gradients that come down, results that go up.

Streams and events are left out (there are none here); which buffer holds what, when, is the same code.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepspeed.offload import pinned
from deepspeed.offload.file_io import IoSettings
from deepspeed.offload.files import FileMemory, FileSettings
from deepspeed.offload.host import HeldBuffer
from deepspeed.offload.pinned import PAGE, host_tensor, page_buffer
from deepspeed.offload.streams import CopyHandle, CopyStream
from deepspeed.zero.storage import MemoryTracker, StorageKind, Tier
from tests.harness import assert_states_equal, on_ranks, run_ranks
from tests.harness.toy_models import make_batch
from tests.offload.test_tiers import offload
from tests.offload.training import Elsewhere, Trained, collect, config, make_engine, train, train_some


def both(settings: dict[str, Any], plain: dict[str, Any], overflow_at: int) -> tuple[Trained, Trained, int]:
    expected = train(plain, 4, overflow_at)
    with Elsewhere():
        engine = make_engine(settings)
        norms = train_some(engine, range(4), overflow_at)
        held = engine._runtime.memory_tracker.live(StorageKind.GRADIENT, Tier.HOST)
        landed = [gradients._destination._held for gradients in engine._runtime.reducer.buckets]
        assert any(isinstance(buffer, HeldBuffer) for buffer in landed)
        got = collect(engine, norms)
        engine.destroy()
    return got, expected, held


@pytest.mark.parametrize("device", ["cpu", "nvme"])
@pytest.mark.parametrize(("stage", "ranks"), [(1, 2), (2, 1), (3, 2)])
def test_copies(stage: int, ranks: int, device: str, tmp_path: Path) -> None:
    for accumulation, precision, overflow_at in ((1, "fp16", 2), (3, "bf16", -1)):
        settings: dict[str, Any] = {"stage": stage, "precision": precision, "accumulation": accumulation}
        sections = offload(device, "none", tmp_path, pipelined=True)
        offloaded = config(**settings, **sections, sub_group_size=4096)
        for got, expected, held in run_ranks(both, ranks, offloaded, config(**settings), overflow_at):
            for part in ("norms", "compute", "masters", "states"):
                assert_states_equal(getattr(got, part), getattr(expected, part))
            assert held > 0


@on_ranks(2)
def test_dropped_gradients() -> None:
    """Gradients that are thrown away between two steps leave nothing behind."""
    settings = config(2, precision="bf16", accumulation=3, offload_optimizer={"device": "cpu"})
    results = []
    for wasted in (0, 2):
        with Elsewhere():
            engine = make_engine(settings)
            for micro in range(wasted):
                engine.backward(engine(make_batch(9, micro, dist.get_rank())).loss)
            engine.zero_grad()
            engine.micro_steps = 0
            train_some(engine, range(2))
            results.append(collect(engine, []).masters)
            engine.destroy()
    assert_states_equal(results[1], results[0])


def test_buffers_have_exact_size_and_alignment() -> None:
    for nbytes in (1, PAGE, PAGE + 1, 3_000_000):
        buffer = page_buffer(nbytes, pin=False)
        assert buffer.numel() == nbytes and buffer.data_ptr() % PAGE == 0
        assert buffer.untyped_storage().nbytes() == -(-nbytes // PAGE) * PAGE
    assert page_buffer(0, pin=False).numel() == 0
    assert not host_tensor(100, torch.bfloat16, pin=False).is_pinned()


def test_without_accelerator_pinning_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(pinned, "log_dist_once", lines.append)
    assert not pinned.may_pin(False) and lines == []
    assert not pinned.may_pin(True) and len(lines) == 1 and "unpinned" in lines[0]


def test_pinning_registers_the_pages_and_lets_them_go(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int, int]] = []
    mapped: list[bool] = []

    class Runtime:
        def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802 - the driver's name
            calls.append(("lock", address, nbytes))
            return 0

        def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 - the driver's name
            calls.append(("unlock", address, 0))
            mapped.append(is_mapped(address))
            return 0

    class Accelerator:
        def device_name(self) -> str:
            return "cuda"

        def synchronize(self) -> None:
            calls.append(("synchronize", 0, 0))

    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(pinned, "get_accelerator", Accelerator)
    buffer = page_buffer(5000, pin=True)
    address = buffer.data_ptr()
    assert calls == [("lock", address, 2 * PAGE)]
    assert "dc" in kernel_flags(address), "a forked process must not share pages that a device reads"
    assert "dc" not in kernel_flags(page_buffer(5000, pin=False).data_ptr())
    view = buffer[100:200]
    del buffer
    assert len(calls) == 1, "still in use"
    del view
    assert calls[1:] == [("synchronize", 0, 0), ("unlock", address, 0)], "a copy may still be on its way"
    assert mapped == [True], "the driver must let go of pages that are still there"


def kernel_flags(address: int) -> list[str]:
    """The flags of the mapping that holds an address, as Linux spells them; "dc" is left out of forked processes."""
    is_there = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if words[0] == "VmFlags:" and is_there:
            return words[1:]
        if "-" in words[0] and not words[0].endswith(":"):
            first, last = words[0].split("-")
            is_there = int(first, 16) <= address < int(last, 16)
    return []


def is_mapped(address: int) -> bool:
    """Whether this process has memory at an address."""
    stretches = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(first, 16) <= address < int(last, 16) for first, last in stretches)


def test_buffers_come_back_when_their_copies_are_over(tmp_path: Path) -> None:
    """Otherwise nothing is read ahead once every buffer has been used."""

    class Copy(CopyHandle):
        is_over = False
        is_done = False

        def has_arrived(self) -> bool:
            return self.is_over

    class Up(CopyStream):
        def copy(self, target: torch.Tensor, source: torch.Tensor) -> Copy:
            target.copy_(source)
            copies.append(Copy())
            return copies[-1]

    copies: list[Copy] = []
    device = torch.device("cpu")
    settings = FileSettings(str(tmp_path), "parameters", 0, IoSettings(block_size=PAGE), pin=False)
    memory = FileMemory(device, settings, buffer_count=1, buffer_bytes=lambda tensors: PAGE, up=Up(device))
    memory.open([(8, 4)] * 2, MemoryTracker())
    try:
        first, second = (memory.empty(8, torch.float32, name) for name in ("first", "second"))
        memory.write(second, torch.arange(8.0))
        memory.settle()
        memory.read(first, torch.empty(8))
        memory.announce(second)
        assert not memory._ahead, "the only buffer is being copied from"
        copies[0].is_over = True
        memory.announce(second)
        assert memory._ahead
        memory.read(second, found := torch.empty(8))
        assert found.tolist() == list(range(8))
    finally:
        memory.close()
