"""Allocates host buffers of exact size on page boundaries, page-locked if an accelerator benefits.

Torch's allocator of page-locked memory rounds every block up to a power of two, which can double the size of a large
shard, and does not align to pages, which direct file access needs. So buffers are mapped from the system and
registered with the driver if it supports that.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.logging import log_dist_once, warn_once

PAGE = mmap.PAGESIZE
_HUGE_PAGE_BYTES = 8 << 20  # smallest buffer for which huge pages are requested


def round_to_pages(nbytes: int) -> int:
    """Returns ``nbytes`` rounded up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


def may_pin(requested: bool) -> bool:
    """Returns whether page-locking is requested and has a use here; logs once if it has none."""
    if not requested:
        return False
    if get_accelerator().computes_in_host_memory:
        log_dist_once("pin_memory: there is no accelerator, so host memory is left unpinned")
        return False
    return True


class _PageBuffer(mmap.mmap):
    """Pages from the system that may be locked until they are unmapped.

    ``__del__`` unlocks them: a callback of ``weakref`` would run after they are unmapped.
    """

    unlock: Callable[[], Any] | None = None

    def __del__(self) -> None:
        if self.unlock is not None:
            self.unlock()


class HostMemorySource:
    """Allocates the host memory of offloaded states."""

    @property
    def device(self) -> torch.device:
        """The device of its tensors."""
        return torch.device("cpu")

    def pages(self, nbytes: int, *, pin: bool) -> torch.Tensor:
        """Returns a 1-D uint8 tensor of ``nbytes`` zeros; ``nbytes`` must be whole pages, and not 0."""
        mapped = _PageBuffer(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if nbytes >= _HUGE_PAGE_BYTES:
            # requests pages of 2 MiB: an update reads and writes seven arrays at once, too many for a TLB of small
            # pages
            if hasattr(mmap, "MADV_HUGEPAGE"):
                with contextlib.suppress(OSError):  # raised by kernels without huge pages; small pages work too
                    mapped.madvise(mmap.MADV_HUGEPAGE)
        with torch.inference_mode(False):
            buffer = torch.frombuffer(mapped, dtype=torch.uint8)
        if pin:
            _register(mapped, buffer)
        return buffer

    def plain(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns an uninitialized 1-D tensor that is not page-locked."""
        with torch.inference_mode(False):
            return torch.empty(numel, dtype=dtype)


_source = HostMemorySource()


@contextlib.contextmanager
def host_memory_from(source: HostMemorySource) -> Iterator[None]:
    """Allocates host memory of offloaded states from ``source`` inside the context."""
    global _source
    before, _source = _source, source
    try:
        yield
    finally:
        _source = before


def host_device() -> torch.device:
    """Returns the device of the tensors that this module allocates."""
    return _source.device


def page_buffer(nbytes: int, *, pin: bool) -> torch.Tensor:
    """Returns a 1-D uint8 tensor of ``nbytes`` zeros that begins on a page boundary.

    Args:
        nbytes: Its size; its memory is rounded up to whole pages.
    """
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    return _source.pages(round_to_pages(nbytes), pin=pin)[:nbytes]


def host_tensor(numel: int, dtype: torch.dtype, *, pin: bool) -> torch.Tensor:
    """Returns a 1-D host tensor of ``numel`` elements, large or pinned ones on page boundaries and zeroed."""
    if not pin and numel * dtype.itemsize < _HUGE_PAGE_BYTES:
        return _source.plain(numel, dtype)
    return page_buffer(numel * dtype.itemsize, pin=pin).view(dtype)


def _register(mapped: _PageBuffer, buffer: torch.Tensor) -> None:
    """Page-locks a buffer until its mapping is freed; warns once if that is not possible."""
    if get_accelerator().device_name() != "cuda":
        warn_once("pin:registering", "pin_memory: only CUDA can lock buffers of exact size; they are not pinned")
        return
    runtime = torch.cuda.cudart()
    address, nbytes = buffer.data_ptr(), buffer.numel()
    error = int(runtime.cudaHostRegister(address, nbytes, 0))
    if error != 0:
        warn_once(
            "pin:failed",
            f"pin_memory: the driver could not lock {nbytes:,} bytes of host memory (error {error}); copies will not "
            "overlap. Raise the limit of locked memory (ulimit -l), or set pin_memory to false",
        )
        return
    # The storage keeps ``mapped`` alive, so the pages stay locked while the tensor is in use.
    mapped.unlock = functools.partial(_unlock, runtime, address, get_accelerator().synchronize)
    # Not in forked processes, such as workers of a DataLoader: after a fork the first write to a shared page copies it,
    # and kernels before 5.12 may give the copy to the parent, while the device goes on with the old page.
    if hasattr(mmap, "MADV_DONTFORK"):
        mapped.madvise(mmap.MADV_DONTFORK)


def _unlock(runtime: Any, address: int, synchronize: Callable[[], Any]) -> None:
    """Unlocks pages after the end of their copies, for which an engine that was dropped has not waited."""
    if not sys.is_finalizing():  # the process ends with its pages, and the driver may be unloaded
        synchronize()
        runtime.cudaHostUnregister(address)
