"""Operations of the package give the same on a device as on the CPU."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.comm.base.codec import coded_nbytes, decode_add, encode
from deepspeed.comm.codecs.table import CODECS
from deepspeed.offload.pinned import page_buffer
from deepspeed.ops.sparse_attention import (
    BigBirdSparsityConfig,
    FixedSparsityConfig,
    SparsityConfig,
    VariableSparsityConfig,
)
from tests.gpu.places import on_both, run_at
from tests.ops.sparse_attention.definitions import fused_beside_dense

NUMEL = 3 * 2048 + 64


def _coded(name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes and decoded values of one bucket, on the host and on the device."""
    row = CODECS[name]
    values = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))
    made = []
    for device in ("cpu", get_accelerator().current_device_name()):
        codec = row.make(row.block, feeds_back=row.feeds_back)
        there = values.to(device)
        error = torch.zeros_like(there) if codec.feeds_back else None
        codes = torch.zeros(coded_nbytes(codec, NUMEL), dtype=torch.uint8, device=device)
        encode(codec.fitted(there, error), there, error, codes)
        out = torch.zeros_like(there)
        decode_add(codec, codes, out)
        made += [codes.cpu(), out.cpu()]
    return made[0], made[1], made[2], made[3]


@on_both
@pytest.mark.parametrize("name", [*CODECS])
def test_codes_are_those_of_the_host(place, name):
    codes, values, device_codes, device_values = run_at(place, _coded, name)
    if place == "gpu" and name in ("sign", "1-bit"):  # the scale is a sum, taken in another order
        assert torch.equal(values > 0, device_values > 0)
        torch.testing.assert_close(device_values, values, rtol=1e-6, atol=0.0)
        return
    assert torch.equal(codes, device_codes)
    assert torch.equal(values, device_values)


def _bytes_after_a_fork() -> int:
    """Bytes that reach the device other than the host has written them while a child process lives."""
    pages = page_buffer(1 << 16, pin=True)
    pages.fill_(1)
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    try:
        pages.fill_(2)
        arrived = pages.to(get_accelerator().current_device_name())
        return int((arrived.cpu() != 2).sum())
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@on_both
def test_locked_pages_are_those_that_the_host_writes_after_a_fork(place):
    assert run_at(place, _bytes_after_a_fork) == 0


_PATTERNS: dict[str, tuple[SparsityConfig, int]] = {
    "blocks smaller than a tile": (FixedSparsityConfig(3, 16), 1024),
    "heads that differ, an unfilled last tile": (BigBirdSparsityConfig(3, 24, True, 2), 600),
    "rows that see nothing": (
        VariableSparsityConfig(3, 32, local_window_blocks=[], global_block_indices=[2], attention="unidirectional"),
        256,
    ),
}
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05}


def _attention(name: str) -> dict[str, float]:
    """The largest error of the output and of each gradient, relative to their largest value, by dtype and options."""
    config, length = _PATTERNS[name]
    device = get_accelerator().current_device_name()
    errors = {}
    for dtype in _TOLERANCE:
        for is_causal, is_biased in ((False, False), (True, True)):
            found, exact = fused_beside_dense(config, length, dtype, device, is_causal=is_causal, is_biased=is_biased)
            for part, ours, theirs in zip(("output", "query", "key", "value"), found, exact, strict=True):
                error = (ours.double() - theirs).abs().max() / theirs.abs().max()
                errors[f"{dtype}, causal {is_causal}, biased {is_biased}, {part}"] = float(error)
    return errors


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*_PATTERNS])
def test_sparse_attention_in_one_kernel_is_masked_dense_attention(name):
    for case, error in run_at("gpu", _attention, name).items():
        allowed = _TOLERANCE[torch.float32 if "float32" in case else torch.bfloat16]
        assert error < allowed, f"{case}: {error:.2g}"
