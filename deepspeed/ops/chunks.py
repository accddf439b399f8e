"""Runs an elementwise update over a long flat tensor in cache-sized chunks.

An update that casts the gradient, unscales it, steps and writes a 16-bit copy reads every element several times. Done
on whole tensors each pass comes from memory; done chunk by chunk the later passes come from cache. The result does
not depend on the chunk size: every operation is elementwise, and torch's fused CPU kernels give the same bits as long
as cuts fall on multiples of 16 elements, where their vectorised body ends (ours fall on multiples of 64).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deepspeed.accelerator import get_accelerator

if TYPE_CHECKING:
    from deepspeed.ops.rounding import ElementRounding

#: ``kernel(params, grads, states)``: updates lists of equally long tensors in place; ``states`` holds one list per
#: state name. The gradients are read only.
Kernel = Callable[[list[Tensor], list[Tensor], list[list[Tensor]]], None]

#: Alignment of every cut, in elements.
ALIGNMENT = 64

#: Elements per thread and chunk on the CPU. Every chunk costs 15 us of dispatch; one that is too long leaves the
#: cache before its cast. AdamW of 16M elements on one core, ms without and with a bf16 copy: 128Ki 8.8 and 11.1, 256Ki
#: 8.2 and 10.1, 512Ki 8.0 and 9.8, 1Mi 8.0 and 9.8; the fused kernel on the whole tensor 7.6, and 10.0 with a cast.
CPU_CHUNK_NUMEL = 512 * 1024

#: More threads than this do not make the chunk longer, so that the scratch memory stays below 8 MiB per dtype.
_MAX_THREAD_FACTOR = 4

#: Elements per chunk on other devices: long enough to hide launches, short enough to bound the fp32 scratch (64 MiB).
DEVICE_CHUNK_NUMEL = 1 << 24


class _Scratch(threading.local):
    """Scratch of one thread. Host updates may run on several threads at once."""

    def __init__(self) -> None:
        self.by_key: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}


_buffers = _Scratch()


def scratch(role: str, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns an uninitialised 1-D tensor, reused between calls on the CPU.

    A fresh MiB from the allocator is handed back to the system and faulted in again each time; reuse avoids that.
    Accelerators have caching allocators, so there a new tensor is made, which is also safe across streams.

    Args:
        role: Two scratches that are alive together need different roles.
        numel: Elements.
        dtype: Its dtype.
        device: Its device.
    """
    if not get_accelerator().shares_host_memory(device):
        return torch.empty(numel, dtype=dtype, device=device)
    buffer = _buffers.by_key.get((role, dtype, device))
    if buffer is None or buffer.numel() < numel:
        with torch.inference_mode(False):  # an inference tensor could not be written to from ordinary code later
            buffer = torch.empty(numel, dtype=dtype, device=device)
        _buffers.by_key[role, dtype, device] = buffer
    return buffer[:numel]


def drop_scratch(device: torch.device) -> None:
    """Gives back what :func:`scratch` keeps for ``device`` and this thread."""
    for key in [key for key in _buffers.by_key if key[2] == device]:
        del _buffers.by_key[key]


def default_chunk_numel(device: torch.device) -> int:
    """Chunk length for ``device``, in elements: a multiple of :data:`ALIGNMENT`."""
    if not get_accelerator().shares_host_memory(device):
        return DEVICE_CHUNK_NUMEL
    return CPU_CHUNK_NUMEL * min(torch.get_num_threads(), _MAX_THREAD_FACTOR)


def run_in_chunks(
    kernel: Kernel,
    master: Tensor,
    grad: Tensor,
    states: Sequence[Tensor],
    *,
    grad_scale: float | Tensor | None = None,
    out: Tensor | None = None,
    rounding: ElementRounding | None = None,
) -> None:
    """Updates ``master`` and ``states`` in place and writes ``out``.

    Args:
        kernel: The update. It sees fp32 tensors (fp64 if ``master`` is fp64).
        master: 1-D, contiguous, any floating dtype; what is not fp32 is widened chunk by chunk.
        grad: 1-D, same length, any floating dtype. Not changed.
        states: 1-D tensors of the same length.
        grad_scale: One multiplier for the gradient, rounded to fp32; a 0-dim tensor on the same device avoids a
            synchronisation. None: no multiplication.
        out: Receives the new ``master``, cast to its dtype.
        rounding: Rounds what is not fp32; None: to nearest.

    Raises:
        ValueError: The tensors do not fit together.
    """
    _check(master, grad, states, out)
    numel = master.numel()
    if numel == 0:
        return
    chunk = default_chunk_numel(master.device)
    scale = None if isinstance(grad_scale, float | int) and grad_scale == 1 else grad_scale
    dtype = torch.float64 if master.dtype is torch.float64 else torch.float32
    widened_states = tuple(f"state{position}" for position in range(len(states)))
    outs: Sequence[Tensor | None] = out.split(chunk) if out is not None else [None] * (-(-numel // chunk))
    state_chunks = zip(*(state.split(chunk) for state in states), strict=True) if states else [()] * len(outs)

    chunks = zip(master.split(chunk), grad.split(chunk), state_chunks, outs, strict=True)
    for number, (master_chunk, grad_chunk, states_chunk, out_chunk) in enumerate(chunks):
        wide_master = _widened("master", master_chunk, dtype)
        wide_states = [_widened(role, s, dtype) for role, s in zip(widened_states, states_chunk, strict=True)]
        kernel([wide_master], [_scaled(grad_chunk, scale, dtype)], [[state] for state in wide_states])
        roles = ("master", *widened_states)
        for role, narrow, wide in zip(roles, (master_chunk, *states_chunk), (wide_master, *wide_states), strict=True):
            if wide is narrow:
                continue
            if rounding is None:
                narrow.copy_(wide)
            else:
                rounding.store(wide, narrow, role=role, start=number * chunk)
        if out_chunk is not None:
            out_chunk.copy_(wide_master if rounding is None else master_chunk)


def _widened(role: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if tensor.dtype is dtype:
        return tensor
    return scratch(role, tensor.numel(), dtype, tensor.device).copy_(tensor)


def _scaled(tensor: Tensor, scale: float | Tensor | None, dtype: torch.dtype) -> Tensor:
    """Returns ``tensor`` in ``dtype`` times ``scale``; ``tensor`` itself where that changes nothing."""
    if tensor.dtype is dtype:
        if scale is None:
            return tensor
        return torch.mul(tensor, scale, out=scratch("grad", tensor.numel(), dtype, tensor.device))
    wide = scratch("grad", tensor.numel(), dtype, tensor.device).copy_(tensor)
    # Multiplied after widening: a product rounded to 16 bit would lose the very digits the fp32 master is for.
    return wide if scale is None else wide.mul_(scale)


def _check(master: Tensor, grad: Tensor, states: Sequence[Tensor], out: Tensor | None) -> None:
    others = {"grad": grad, **{f"state {i}": state for i, state in enumerate(states)}}
    if out is not None:
        others["out"] = out
    if master.dim() != 1 or not master.is_contiguous():
        raise ValueError(f"master must be 1-D and contiguous, but has shape {tuple(master.shape)}")
    for name, tensor in others.items():
        if tensor.shape != master.shape or not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous with the shape of master, {tuple(master.shape)}, "
                f"but has shape {tuple(tensor.shape)} and strides {tensor.stride()}"
            )
        if tensor.device != master.device or not tensor.is_floating_point():
            raise ValueError(
                f"{name} must be floating point on {master.device}, but is {tensor.dtype} on {tensor.device}"
            )
