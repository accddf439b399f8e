"""A device that is only clocks: CPU tensors, and a check that everything on them is ordered (docs/design/device.md).

with simulated_device(ranks=2) as device:
    engine = deepspeed.initialize(...)      # finds an accelerator called "cuda" and NCCL-like communicators
    ...                                     # trains; unordered work raises OrderError at the end of the block

``simulated_device`` has one rank; others are mirrors of it, which costs nothing. ``simulated_rank`` is for a body of
``tests.harness.run_ranks(body, ranks, backend=None)``, where the other ranks are processes and values are right.

What a test can ask: ``device.clocks.launches`` and ``device.clocks.waits`` (kernels queued, and how often the host
waited for the device), ``device.accelerator.memory_allocated()``, ``memory_reserved()`` and their peaks (as torch's
allocator rounds and keeps blocks), ``device.pinned`` (its allocator of page-locked memory), ``device.findings``, and
``device.clocks.streams``.
"""

from tests.harness.device.simulation import Device, OrderError, simulated_device, simulated_rank

__all__ = ["Device", "OrderError", "simulated_device", "simulated_rank"]
