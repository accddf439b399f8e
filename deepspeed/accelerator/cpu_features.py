"""What this machine's processor can do natively."""

from __future__ import annotations

import functools
from pathlib import Path

import torch

# torch's names for instructions that multiply bf16: x86 (AVX-512, AMX) and ARM (NEON, SVE).
_TORCH_CAPABILITIES = ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16")
# The kernel's names for the same in /proc/cpuinfo ("flags" on x86, "Features" on ARM).
_KERNEL_FLAGS = frozenset(("avx512_bf16", "amx_bf16", "bf16", "svebf16"))


@functools.cache
def cpu_has_bf16() -> bool:
    """Whether this processor has native bf16 instructions.

    Without them bf16 still computes the right thing on the CPU, but many times slower than fp32.
    """
    if hasattr(torch.cpu, "get_capabilities"):  # older torch has no public query
        capabilities = torch.cpu.get_capabilities()
        return any(bool(capabilities.get(name)) for name in _TORCH_CAPABILITIES)
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and _flags_have_bf16(cpuinfo.read_text())


def _flags_have_bf16(cpuinfo: str) -> bool:
    """Whether the text of ``/proc/cpuinfo`` names a bf16 instruction set."""
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features") and _KERNEL_FLAGS & set(value.split()):
            return True
    return False
