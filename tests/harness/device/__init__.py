"""A device that is only clocks: CPU tensors, and a check that everything on them is ordered (docs/design/device.md).

with simulated_device(ranks=2) as device:
    engine = deepspeed.initialize(...)      # finds an accelerator called "cuda" and NCCL-like communicators
    ...                                     # trains; unordered work raises OrderError at the end of the block
"""

from tests.harness.device.simulation import Device, OrderError, simulated_device, simulated_rank

__all__ = ["Device", "OrderError", "simulated_device", "simulated_rank"]
