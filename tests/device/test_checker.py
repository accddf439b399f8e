"""The checker itself: small programs that are ordered, and the same programs with the ordering left out."""

import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.offload.file_io import IoSettings
from deepspeed.offload.pinned import PAGE, host_tensor
from deepspeed.offload.run_directory import open_file
from tests.harness.device import Device, OrderError, simulated_device

DEVICE = "cuda"


def on_device(numel: int = 8) -> torch.Tensor:
    return torch.ones(numel, device=DEVICE)


def locked(numel: int = 8) -> torch.Tensor:
    return torch.zeros(numel, pin_memory=True)


class Streams:
    """The default stream, another one, and the word by which a program leaves its ordering out."""

    def __init__(self, is_ordered: bool) -> None:
        self.accelerator = get_accelerator()
        self.default = self.accelerator.current_stream()
        self.other = self.accelerator.Stream()
        self.is_ordered = is_ordered

    def on_other(self) -> Any:
        return self.accelerator.stream(self.other)

    def only_if_ordered(self, wait: Callable[[], Any]) -> None:
        if self.is_ordered:
            wait()


def a_kernel_on_another_stream(s: Streams) -> None:
    x = on_device()
    s.only_if_ordered(lambda: s.other.wait_stream(s.default))
    with s.on_other():
        x.mul_(2)


def two_writes(s: Streams) -> None:
    x = on_device()
    s.other.wait_stream(s.default)
    with s.on_other():
        x.zero_()
    s.only_if_ordered(lambda: s.default.wait_stream(s.other))
    x.fill_(3)


def a_write_after_a_read(s: Streams) -> None:
    x = on_device()
    s.other.wait_stream(s.default)
    with s.on_other():
        torch.add(x, 1)
    event = s.other.record_event()
    s.only_if_ordered(lambda: s.default.wait_event(event))
    x.zero_()


def an_event_too_early(s: Streams) -> None:
    x = on_device()
    event = s.accelerator.Event()
    if not s.is_ordered:
        event.record(s.default)
    x.mul_(2)
    if s.is_ordered:
        event.record(s.default)
    s.other.wait_event(event)
    with s.on_other():
        x.sum()


def the_host_reads_what_comes_down(s: Streams) -> None:
    x, host = on_device(), locked()
    host.copy_(x, non_blocking=s.is_ordered is False)
    host.add_(1)


def the_host_reads_after_an_event(s: Streams) -> None:
    host = locked()
    host.copy_(on_device(), non_blocking=True)
    event = s.default.record_event()
    s.only_if_ordered(event.synchronize)
    host.tolist()


def the_host_reads_after_an_item(s: Streams) -> None:
    x, host = on_device(), locked()
    host.copy_(x, non_blocking=True)
    s.only_if_ordered(x.sum().item)
    host.tolist()


def the_host_reads_after_all_is_over(s: Streams) -> None:
    x, host = on_device(), locked()
    s.other.wait_stream(s.default)
    with s.on_other():
        host.copy_(x, non_blocking=True)
    s.only_if_ordered(s.accelerator.synchronize)
    host.tolist()


def the_host_writes_what_goes_up(s: Streams) -> None:
    host = locked()
    on_device().copy_(host, non_blocking=True)
    s.only_if_ordered(s.default.synchronize)
    host.fill_(5)


def a_query_without_a_result(s: Streams) -> None:
    host = locked()
    on_device().copy_(host, non_blocking=True)
    event = s.default.record_event()
    if event.query() or not s.is_ordered:
        host.fill_(5)


def memory_that_another_stream_uses(s: Streams) -> None:
    x = on_device()
    s.other.wait_stream(s.default)
    with s.on_other():
        torch.add(x, 1)
    if s.is_ordered:
        x.record_stream(s.other)
    del x
    on_device()


def memory_that_was_waited_for(s: Streams) -> None:
    x = on_device()
    s.other.wait_stream(s.default)
    with s.on_other():
        torch.add(x, 1)
    del x
    s.only_if_ordered(lambda: s.default.wait_stream(s.other))
    on_device()


def memory_that_is_resized_away(s: Streams) -> None:
    x = on_device()
    s.other.wait_stream(s.default)
    with s.on_other():
        x.mul_(2)
    s.only_if_ordered(lambda: s.default.wait_stream(s.other))
    x.untyped_storage().resize_(0)
    x.untyped_storage().resize_(32)


def pages_that_are_unlocked(s: Streams) -> None:
    pages = host_tensor(1024, torch.float32, pin=True)
    on_device(1024).copy_(pages, non_blocking=True)
    s.only_if_ordered(s.default.synchronize)
    del pages


def overlapping_parts(s: Streams) -> None:
    x = on_device(16)
    s.other.wait_stream(s.default)
    with s.on_other():
        x[:8].zero_()
    x[8 if s.is_ordered else 7 :].zero_()


def columns(s: Streams) -> None:
    x = on_device(16).view(4, 4)
    s.other.wait_stream(s.default)
    with s.on_other():
        x[:, 0].zero_()
    x[:, 1 if s.is_ordered else 0 :].zero_()


def a_list_of_copies(s: Streams) -> None:
    targets, sources = [on_device(), on_device()], [on_device(), on_device()]
    s.only_if_ordered(lambda: s.other.wait_stream(s.default))
    with s.on_other():
        torch._foreach_copy_(targets, sources)


def backward(s: Streams) -> None:
    weight = on_device().requires_grad_()
    (weight * 2).sum().backward()
    s.only_if_ordered(lambda: s.other.wait_stream(s.default))
    with s.on_other(), torch.no_grad():
        assert weight.grad is not None
        weight.grad.mul_(2)


def what_nobody_has_written(s: Streams) -> None:
    x = torch.empty(16, device=DEVICE)
    x[: 16 if s.is_ordered else 15].zero_()
    torch.add(x, 1)


PROGRAMS = (
    what_nobody_has_written,
    a_kernel_on_another_stream,
    two_writes,
    a_write_after_a_read,
    an_event_too_early,
    the_host_reads_what_comes_down,
    the_host_reads_after_an_event,
    the_host_reads_after_an_item,
    the_host_reads_after_all_is_over,
    the_host_writes_what_goes_up,
    a_query_without_a_result,
    memory_that_another_stream_uses,
    memory_that_was_waited_for,
    memory_that_is_resized_away,
    pages_that_are_unlocked,
    overlapping_parts,
    columns,
    a_list_of_copies,
    backward,
)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_both_verdicts(program: Callable[[Streams], None]) -> None:
    with simulated_device():
        program(Streams(is_ordered=True))
    with pytest.raises(OrderError), simulated_device():
        program(Streams(is_ordered=False))


def findings_of(program: Callable[[Device], Any], **settings: Any) -> list[str]:
    with pytest.raises(OrderError), simulated_device(**settings) as device:
        program(device)
    return device.findings


def test_a_finding_is_a_sentence_with_both_places() -> None:
    (sentence,) = findings_of(lambda device: two_writes(Streams(is_ordered=False)))
    places = re.findall(r"tests/device/test_checker\.py:\d+", sentence)
    assert len(set(places)) >= 2 and "\n" not in sentence
    assert "the default stream writes to device memory (fill_" in sentence
    assert "the write on stream 1 (zero_" in sentence


def test_a_pair_of_places_is_reported_once() -> None:
    def run(device: Device) -> None:
        s = Streams(is_ordered=False)
        for _ in range(3):
            two_writes(s)

    assert len(findings_of(run)) == 1


def test_collectives_are_waited_for_by_streams_only() -> None:
    def program(waits: bool, host_waits: bool) -> Callable[[Device], None]:
        def run(device: Device) -> None:
            communicator = device.world.communicator((0, 2))
            flat, host = on_device(16), locked(16)
            work = communicator._allgather_base(flat, flat[:8])
            if waits:
                work.wait()
            host.copy_(flat, non_blocking=True)
            if host_waits:
                device.accelerator.synchronize()
            host.tolist()

        return run

    with simulated_device(ranks=2) as device:
        program(True, True)(device)
    (sentence,) = findings_of(program(False, True), ranks=2)
    assert "the stream of communicator" in sentence
    (sentence,) = findings_of(program(True, False), ranks=2)
    assert sentence.startswith("the host reads page-locked host memory (tolist")


def test_a_collective_keeps_its_tensors_until_it_is_waited_for() -> None:
    def run(device: Device) -> None:
        communicator = device.world.communicator((0, 2))
        work = communicator.allreduce([on_device()])
        on_device()
        work.wait()
        del work
        on_device()

    with simulated_device(ranks=2) as device:
        run(device)


def test_transfers_to_a_file(tmp_path: Path) -> None:
    for is_ordered in (True, False):
        with nullcontext() if is_ordered else pytest.raises(OrderError, match="the disk"), simulated_device():
            file = open_file(tmp_path / f"file {is_ordered}", IoSettings())
            file.grow(PAGE)
            buffer = host_tensor(PAGE, torch.uint8, pin=True)
            transfer = file.write(buffer, 0)
            if is_ordered:
                transfer.wait()
            buffer.fill_(1)
            transfer.wait()
            file.close()


def test_a_quick_device_has_reached_every_event() -> None:
    with simulated_device(quick=True):
        s = Streams(is_ordered=True)
        host = locked()
        on_device().copy_(host, non_blocking=True)
        assert s.default.record_event().query()
        host.fill_(5)
    with simulated_device():
        on_device()
        assert not get_accelerator().current_stream().record_event().query()


def test_tensors_report_their_device() -> None:
    with simulated_device():
        x = on_device()
        assert (x.device.type, x.is_cuda, x.cpu().device.type, x.cpu().is_cuda) == ("cuda", True, "cpu", False)
        layer = torch.nn.Linear(3, 3).to(DEVICE)
        assert all(p.device == torch.device("cuda", 0) for p in layer.parameters())
        layer(torch.zeros(2, 3).to(DEVICE)).sum().backward()
        assert layer.weight.grad is not None and layer.weight.grad.is_cuda
        assert torch.empty_like(x, device="cpu").device.type == "cpu" and x.new_zeros(3).is_cuda
        assert not torch.zeros_like(x, device="cpu").is_cuda and not torch.ones(3).is_cuda
        assert locked().is_pinned() and not torch.zeros(3).is_pinned()
    assert torch.zeros(3).device.type == "cpu" and "device" not in vars(torch.Tensor)


def test_a_kernel_on_memory_of_both_kinds_is_found() -> None:
    (sentence,) = findings_of(lambda device: on_device().add_(torch.ones(8)))
    assert "a host tensor of shape (8,)" in sentence
    with simulated_device():
        on_device().add_(torch.tensor(2.0))  # a number


def test_memory_is_counted() -> None:
    with simulated_device() as device:
        accelerator = device.accelerator
        before = accelerator.memory_allocated()
        x = on_device(1000)
        y = x + 1
        assert accelerator.memory_allocated() - before == 2 * 4096
        del x
        y.untyped_storage().resize_(0)
        assert accelerator.memory_allocated() == before and accelerator.max_memory_allocated() - before == 8192
        accelerator.reset_peak_memory_stats()
        y.untyped_storage().resize_(400)
        torch.zeros(1000)  # of the host
        assert accelerator.max_memory_allocated() - before == 512
        assert accelerator.memory_reserved() == accelerator.max_memory_reserved() == 2 << 20


def test_launches_and_waits_are_counted() -> None:
    with simulated_device() as device:
        x = on_device()
        launches, waits = device.clocks.launches, device.clocks.waits
        y = x.mul(x).neg()
        assert (device.clocks.launches - launches, device.clocks.waits - waits) == (2, 0)
        y.sum().item()
        assert device.clocks.waits - waits == 1
        torch.bincount(torch.zeros(3, dtype=torch.int64, device=DEVICE))
        assert device.clocks.waits - waits == 2
