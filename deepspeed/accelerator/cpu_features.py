"""What this machine's processor can do natively."""

from __future__ import annotations

import functools
from pathlib import Path

import torch

# torch's names for instructions that multiply bf16: x86 (AVX-512, AMX) and ARM (NEON, SVE).
_TORCH_BF16 = ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16")
# The kernel's names for the same in /proc/cpuinfo ("flags" on x86, "Features" on ARM).
_KERNEL_BF16 = frozenset(("avx512_bf16", "amx_bf16", "bf16", "svebf16"))
_TORCH_FP16 = ("avx512_fp16", "amx_fp16", "fp16_arith")
_KERNEL_FP16 = frozenset(("avx512_fp16", "amx_fp16", "asimdhp"))


@functools.cache
def cpu_has_bf16() -> bool:
    """Returns whether this processor has native bf16 instructions.

    Without them bf16 still computes the right thing on the CPU, but many times slower than fp32.
    """
    return _has(_TORCH_BF16, _KERNEL_BF16)


@functools.cache
def cpu_has_fp16() -> bool:
    """Returns whether this processor has native fp16 arithmetic; converting to and from fp16 does not count.

    Without it fp16 still computes the right thing on the CPU, but tens of times slower than fp32.
    """
    return _has(_TORCH_FP16, _KERNEL_FP16)


def _has(torch_names: tuple[str, ...], kernel_flags: frozenset[str]) -> bool:
    if hasattr(torch.cpu, "get_capabilities"):  # older torch has no public query
        capabilities = torch.cpu.get_capabilities()
        if any(bool(capabilities.get(name)) for name in torch_names):
            return True
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and _flags_have(cpuinfo.read_text(), kernel_flags)


def _flags_have(cpuinfo: str, kernel_flags: frozenset[str]) -> bool:
    """Returns whether the text of ``/proc/cpuinfo`` names one of the instruction sets."""
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features") and kernel_flags & set(value.split()):
            return True
    return False
