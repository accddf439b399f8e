"""The models of torch's allocators: sizes, splitting, joining, streams, and what a device that lags behind keeps."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.harness.device import simulated_device
from tests.harness.device.allocator import KIB, MIB, DeviceAllocator, PinnedAllocator


class _Device:
    """Streams by name; :meth:`finish` ends what was queued on one."""

    def __init__(self) -> None:
        self._queued: dict[Any, int] = {}
        self._over: dict[Any, int] = {}

    def event(self, stream: Any) -> Callable[[], bool]:
        self._queued[stream] = number = self._queued.get(stream, 0) + 1
        return lambda: self._over.get(stream, 0) >= number

    def finish(self, stream: Any) -> None:
        self._over[stream] = self._queued.get(stream, 0)


def _never(_stream: Any) -> Callable[[], bool]:
    return lambda: False


@pytest.mark.parametrize(
    ("nbytes", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
        (11 * MIB + 1, 12 * MIB, 12 * MIB),  # the rest is too small to be split off
        (30 * MIB, 30 * MIB, 30 * MIB),
    ],
)
def test_sizes_of_blocks_and_segments(nbytes: int, allocated: int, reserved: int) -> None:
    allocator = DeviceAllocator(_never)
    block = allocator.allocate(nbytes, "compute")
    assert (block.size, allocator.allocated, allocator.reserved) == (allocated, allocated, reserved)
    allocator.free(block)
    assert (allocator.allocated, allocator.reserved, allocator.allocated_peak) == (0, reserved, allocated)
    allocator.empty_cache()
    assert (allocator.reserved, allocator.reserved_peak) == (0, reserved)


def test_small_requests_share_a_segment_and_the_best_fit_is_taken() -> None:
    allocator = DeviceAllocator(_never)
    sizes = (64 * KIB, 512, 16 * KIB, 512, 32 * KIB, 512)
    blocks = [allocator.allocate(size, "compute") for size in sizes]
    assert allocator.segments == 1
    for block in blocks[::2]:
        allocator.free(block)
    assert allocator.allocate(10 * KIB, "compute").address == blocks[2].address
    assert allocator.allocate(6 * KIB, "compute").address == blocks[2].address + 10 * KIB  # what was split off
    assert allocator.allocate(17 * KIB, "compute").address == blocks[4].address


def test_free_neighbors_are_joined() -> None:
    allocator = DeviceAllocator(_never)
    first, second, third = (allocator.allocate(6 * MIB, "compute") for _ in range(3))
    allocator.free(first)
    allocator.free(third)
    assert allocator.allocate(7 * MIB, "compute").address == third.address  # with the 2 MiB behind it
    allocator.free(second)
    assert allocator.allocate(9 * MIB, "compute").address == first.address
    assert allocator.segments == 1


def test_free_memory_in_two_segments_does_not_serve_one_request() -> None:
    allocator = DeviceAllocator(_never)
    blocks = [allocator.allocate(12 * MIB, "compute") for _ in range(2)]
    for block in blocks:
        allocator.free(block)
    allocator.allocate(24 * MIB, "compute")
    assert (allocator.reserved, allocator.allocated) == (48 * MIB, 24 * MIB)


def test_a_large_block_serves_no_small_request() -> None:
    allocator = DeviceAllocator(_never)
    allocator.free(allocator.allocate(4 * MIB, "compute"))
    allocator.allocate(512, "compute")
    assert allocator.reserved == 22 * MIB


def test_a_freed_block_serves_its_stream_alone() -> None:
    allocator = DeviceAllocator(_never)
    block = allocator.allocate(4 * MIB, "compute")
    allocator.free(block)
    assert allocator.allocate(4 * MIB, "copy").address != block.address
    assert allocator.allocate(4 * MIB, "compute").address == block.address
    assert allocator.segments == 2


def test_a_lent_block_waits_for_the_other_stream() -> None:
    device = _Device()
    allocator = DeviceAllocator(device.event)
    block = allocator.allocate(12 * MIB, "compute")
    allocator.record_stream(block, "compute")
    allocator.record_stream(block, "copy")
    allocator.free(block)
    assert allocator.allocated == 0
    assert allocator.allocate(12 * MIB, "compute") is not block
    assert allocator.reserved == 24 * MIB  # what record_stream costs where the host is ahead
    device.finish("copy")
    assert allocator.allocate(12 * MIB, "compute") is block


def test_pinned_blocks_are_powers_of_two_and_are_used_again() -> None:
    allocator = PinnedAllocator(_never)
    block = allocator.allocate(5 * MIB)
    assert (block.size, allocator.reserved, allocator.in_use) == (8 * MIB, 8 * MIB, 8 * MIB)
    allocator.free(block)
    assert (allocator.reserved, allocator.in_use) == (8 * MIB, 0)  # locked for good
    assert allocator.allocate(8 * MIB) is block
    assert allocator.allocate(4 * MIB + 1) is not block
    assert allocator.allocate(4 * MIB).size == 4 * MIB  # no larger block serves it
    assert allocator.allocations == 3


def test_pinned_blocks_wait_for_the_copies_that_used_them() -> None:
    device = _Device()
    allocator = PinnedAllocator(device.event)
    first, second, unused = (allocator.allocate(4096) for _ in range(3))
    allocator.record_stream(first, "down")
    allocator.record_stream(first, "up")
    allocator.record_stream(second, "up")
    for block in (first, second, unused):
        allocator.free(block)
    assert allocator.allocate(4096) is unused
    device.finish("up")
    assert allocator.allocate(4096) not in (first, second)  # the first is waited for first
    device.finish("down")
    assert {allocator.allocate(4096), allocator.allocate(4096)} == {first, second}
    assert allocator.allocations == 4


def _copy_down(tensor: torch.Tensor) -> None:
    torch.empty(tensor.shape, pin_memory=True).copy_(tensor, non_blocking=True)


def test_pinned_memory_of_a_device_that_lags_is_not_used_again_before_the_host_has_waited() -> None:
    with simulated_device() as device:
        tensor = torch.zeros(1000, device="cuda")
        for number in range(3):
            _copy_down(tensor)
            assert (device.pinned.allocations, device.pinned.in_use) == (number + 1, 0)
        device.clocks.synchronize()
        for _ in range(3):
            _copy_down(tensor)
        assert (device.pinned.allocations, device.pinned.reserved) == (3, 3 * 4096)
        tensor.to("cpu", non_blocking=True)
        tensor.cpu().pin_memory()  # the host has waited
        assert device.pinned.allocations == 4


def test_record_stream_keeps_memory_of_a_device_that_lags() -> None:
    with simulated_device() as device:
        accelerator = device.accelerator
        stream = accelerator.Stream()
        for number in range(3):
            tensor = torch.zeros(3 * MIB, device="cuda")  # 12 MiB
            stream.wait_stream(accelerator.current_stream())
            with accelerator.stream(stream):
                tensor.mul_(2)
            tensor.record_stream(stream)
            del tensor
            assert accelerator.memory_allocated() == 0
            assert accelerator.memory_reserved() == 12 * MIB * (number + 1)
        device.clocks.synchronize()
        torch.zeros(3 * MIB, device="cuda")
        assert accelerator.memory_reserved() == accelerator.max_memory_reserved() == 36 * MIB
