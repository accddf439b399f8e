"""Host buffers of exact size on page boundaries, page-locked if an accelerator benefits.

Torch's own allocator of page-locked memory rounds every block up to a power of two, which can double the size of a
large shard, and does not align to pages, which direct file access needs. So buffers are mapped from the system and
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
_HUGE = 8 << 20  # smallest size in bytes for which huge pages are requested


def round_to_pages(nbytes: int) -> int:
    """Returns ``nbytes`` rounded up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


def may_pin(requested: bool) -> bool:
    """Returns whether page-locking is requested and would speed anything up here; logs once if it would not."""
    if not requested:
        return False
    if get_accelerator().computes_in_host_memory:
        log_dist_once("pin_memory: there is no accelerator, so host memory is left unpinned")
        return False
    return True


class _PageBuffer(mmap.mmap):
    """Pages from the system, which may be locked for as long as they are mapped.

    Unlocked by ``__del__``, as a callback of ``weakref`` would run after the pages are unmapped.
    """

    unlock: Callable[[], Any] | None = None

    def __del__(self) -> None:
        if self.unlock is not None:
            self.unlock()


class HostMemorySource:
    """Allocates the host memory of offloaded states."""

    @property
    def device(self) -> torch.device:
        """Device of its tensors."""
        return torch.device("cpu")

    def pages(self, nbytes: int, *, pin: bool) -> torch.Tensor:
        """Returns a 1-D uint8 tensor that fills ``nbytes`` (whole pages, above 0), zeroed."""
        mapped = _PageBuffer(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if nbytes >= _HUGE:
            _advise_huge_pages(mapped)
        with torch.inference_mode(False):
            buffer = torch.frombuffer(mapped, dtype=torch.uint8)
        if pin:
            _register(mapped, buffer)
        return buffer

    def plain(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns a 1-D tensor, not initialised, its pages not locked."""
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
    """Returns the device of the tensors that are made here."""
    return _source.device


def page_buffer(nbytes: int, *, pin: bool) -> torch.Tensor:
    """Returns a 1-D uint8 tensor of ``nbytes`` zero bytes that begins on a page boundary and fills whole pages.

    Args:
        nbytes: Size; memory is taken in whole pages.
        pin: Lock its pages for asynchronous copies to and from the accelerator.
    """
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    return _source.pages(round_to_pages(nbytes), pin=pin)[:nbytes]


def host_tensor(numel: int, dtype: torch.dtype, *, pin: bool) -> torch.Tensor:
    """Returns a 1-D host tensor of ``numel`` elements; large and pinned ones in whole pages."""
    if not pin and numel * dtype.itemsize < _HUGE:
        return _source.plain(numel, dtype)
    return page_buffer(numel * dtype.itemsize, pin=pin).view(dtype)


def _advise_huge_pages(mapped: mmap.mmap) -> None:
    """Requests pages of 2 MiB: an update walks over seven streams at once, more than the page table's cache holds."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # raised by a kernel without them; small pages work as well
            mapped.madvise(mmap.MADV_HUGEPAGE)


def _register(mapped: _PageBuffer, buffer: torch.Tensor) -> None:
    """Page-locks memory that torch did not allocate, until the mapping is freed."""
    if get_accelerator().device_name() != "cuda":
        warn_once("pin:registering", "pin_memory: only CUDA can lock pages of exact size; these buffers stay unpinned")
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
    # The storage keeps ``mapped`` alive, so the pages are unlocked no earlier than their last use.
    mapped.unlock = functools.partial(_unlock, runtime, address, get_accelerator().synchronize)
    _keep_from_children(mapped)


def _unlock(runtime: Any, address: int, synchronize: Callable[[], Any]) -> None:
    """Unlocks pages after copies from or to them have ended, as an engine that was dropped did not wait for them."""
    if not sys.is_finalizing():  # the pages end with the process, and the driver may be gone already
        synchronize()
        runtime.cudaHostUnregister(address)


def _keep_from_children(mapped: mmap.mmap) -> None:
    """Excludes the pages from forked processes, such as workers of a ``DataLoader``.

    After a fork the first write to a shared page copies it. Kernels before 5.12 may give the copy to the parent, while
    the device continues reading and writing the old page.
    """
    if hasattr(mmap, "MADV_DONTFORK"):
        mapped.madvise(mmap.MADV_DONTFORK)
