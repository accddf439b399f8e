"""Estimates the time of one operation on a device.

A matrix product reaches a share of the peak, lower for small sizes; elementwise operations reach a share of the
memory bandwidth; a fused attention kernel has a separate share. ``DeviceEfficiency`` has the shares.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepspeed.accelerator.devices import Device

_BACKWARD_OF_ATTENTION = 0.85  # rate of the fused backward kernel over that of the forward kernel
_FULL_HEAD = 128  # head size at which a fused attention kernel reaches its rate


@dataclass(frozen=True)
class DeviceModel:
    """Turns operations into seconds."""

    device: Device

    def matmul(self, m: float, n: float, k: float, *, batch: float = 1, fp8: bool = False) -> float:
        """Returns the seconds of ``batch`` products of (m, k) and (k, n) matrices in bf16, or fp8 where there is it."""
        device, reached = self.device, self.device.efficiency
        fp8 = fp8 and device.fp8_flops > 0
        peak = device.fp8_flops * reached.fp8 if fp8 else device.flops * reached.matmul
        half = reached.half_size * (2 if fp8 else 1)  # tiles are read at the same bytes per second
        share = m * n * k / ((m + half) * (n + half) * (k + half))
        moved = batch * ((1 if fp8 else 2) * (m * k + k * n) + 2 * m * n)
        computed = 2 * batch * m * n * k / (peak * share)
        return reached.factor * max(computed, moved / (device.memory_bandwidth * reached.bandwidth))

    def attention(self, flops: float, head_size: int, *, backward: bool = False) -> float:
        """Returns the seconds of a fused attention kernel; causal attention counts half of its operations."""
        reached = self.device.efficiency
        share = reached.attention * min(1.0, (head_size + _FULL_HEAD) / (2 * _FULL_HEAD))
        share *= _BACKWARD_OF_ATTENTION if backward else 1.0
        return reached.factor * flops / (self.device.flops * share)

    def traffic(self, nbytes: float) -> float:
        """Returns the seconds in which elementwise operations read and write ``nbytes``."""
        reached = self.device.efficiency
        return reached.factor * nbytes / (self.device.memory_bandwidth * reached.bandwidth)
