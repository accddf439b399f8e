"""Part E: single operations of the package beside torch's: updates, codecs, experts, sparse attention."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from deepspeed.comm.base.codec import coded_nbytes, decode_add, encode
from deepspeed.comm.codecs.table import Codec, Int4Codec, Int8Codec, LocoCodec, SignCodec
from deepspeed.ops.elementwise import flat_updater
from deepspeed.parallel.expert.spread import uses_grouped
from on_gpu.part import Report, Settings, timed, waiter

TITLE = "E. Operations"


def run(settings: Settings, report: Report) -> None:
    """Fills the report."""
    report.attempt("Adam", lambda: _adam(settings, report))
    report.attempt("codecs", lambda: _codecs(settings, report))
    report.attempt("experts", lambda: _experts(settings, report))
    report.attempt("sparse attention", lambda: _attention(settings, report))


def _seconds(settings: Settings, run: Callable[[], object]) -> float:
    return timed(run, warmup=1 if settings.dry else 3, steps=3 if settings.dry else 10, wait=waiter(settings.device))


def _adam(settings: Settings, report: Report) -> None:
    """Times one update of flat fp32 masters; GB/s count gradient, master and two moments, read and written."""
    numel = 2**16 if settings.dry else 10**9
    table = report.table("AdamW over one flat run", ["who", "elements", "ms", "GB/s"])
    master = torch.randn(numel, device=settings.device)
    gradient = torch.randn_like(master)
    moved = 7 * 4 * numel  # read gradient, master, moments; write master, moments
    parameter = torch.nn.Parameter(master)
    parameter.grad = gradient
    fused = torch.optim.AdamW([parameter], lr=1e-4, fused=True)
    seconds = _seconds(settings, fused.step)
    report.row(table, "torch, fused", numel, 1e3 * seconds, moved / seconds / 1e9)
    del fused
    optimizer = torch.optim.AdamW([parameter], lr=1e-4)
    updater = flat_updater(optimizer)
    assert updater is not None
    state: dict[str, object] = {}
    updater.init_flat_state(optimizer.param_groups[0], master, state)
    seconds = _seconds(
        settings,
        lambda: updater.flat_update(optimizer.param_groups[0], master, gradient, state),
    )
    report.row(table, "ours, flat run", numel, 1e3 * seconds, moved / seconds / 1e9)


def _codecs(settings: Settings, report: Report) -> None:
    numel = 2**18 if settings.dry else 10**8
    columns = ["codec", "elements", "encode (ms)", "GB/s", "decode (ms)", "GB/s", "operations"]
    table = report.table("Codecs on one bucket", columns, "GB/s of fp32 values. A copy of them is the floor.")
    values = torch.randn(numel, device=settings.device)
    out = torch.zeros_like(values)
    seconds = _seconds(settings, lambda: out.copy_(values))
    report.row(table, "none (copy)", numel, 1e3 * seconds, 4 * numel / seconds / 1e9, None, None, 1)
    for codec in (Int8Codec(), Int4Codec(), SignCodec(), LocoCodec()):
        error = torch.zeros_like(values) if codec.feeds_back else None
        codes = torch.empty(coded_nbytes(codec, numel), dtype=torch.uint8, device=settings.device)

        def write(codec: Codec = codec, error: torch.Tensor | None = error, codes: torch.Tensor = codes) -> None:
            encode(codec, values, error, codes)

        def read(codec: Codec = codec, codes: torch.Tensor = codes) -> None:
            decode_add(codec, codes, out)

        to, back = _seconds(settings, write), _seconds(settings, read)
        rates = (4 * numel / to / 1e9, 4 * numel / back / 1e9)
        report.row(table, codec.name, numel, 1e3 * to, rates[0], 1e3 * back, rates[1], _operations(write))


def _operations(run: Callable[[], None]) -> int:
    """Returns how many operations torch dispatches."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        number = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            self.number += 1
            return function(*args, **(kwargs or {}))

    with Count() as count:
        run()
    return count.number


def _experts(settings: Settings, report: Report) -> None:
    """Times the products of eight stacked experts: one ``grouped_mm`` beside a loop."""
    experts, rows, width = (8, 64, 32) if settings.dry else (8, 32_768, 4096)
    dtype = torch.bfloat16
    weights = torch.randn(experts, width, width, device=settings.device, dtype=dtype)
    x = torch.randn(rows, width, device=settings.device, dtype=dtype)
    each = rows // experts
    ends = torch.arange(1, experts + 1, device=settings.device, dtype=torch.int32) * each
    table = report.table("Products of stacked experts", ["who", "rows", "width", "ms", "TFLOP/s"])
    work = 2 * rows * width * width

    def loop() -> None:
        for expert in range(experts):
            torch.mm(x[expert * each : (expert + 1) * each], weights[expert])

    seconds = _seconds(settings, loop)
    report.row(table, "a loop", rows, width, 1e3 * seconds, work / seconds / 1e12)
    if uses_grouped(weights):
        seconds = _seconds(settings, lambda: torch.nn.functional.grouped_mm(x, weights, offs=ends))
        report.row(table, "grouped_mm", rows, width, 1e3 * seconds, work / seconds / 1e12)
    else:
        report.row(table, "grouped_mm (not on this device)", rows, width, None, None)


def _attention(settings: Settings, report: Report) -> None:
    """Times attention forward, and forward with backward: dense, and with two patterns."""
    from deepspeed.ops.sparse_attention import BigBirdSparsityConfig, FixedSparsityConfig, SparseSelfAttention

    heads, length, width, block = (2, 64, 16, 16) if settings.dry else (16, 8192, 64, 64)
    operands = [
        torch.randn(1, heads, length, width, device=settings.device, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    ]
    table = report.table("Attention", ["who", "tokens", "shown", "forward (ms)", "forward and backward (ms)"])

    def row(name: str, shown: float, attend: Callable[..., torch.Tensor]) -> None:
        seconds = _seconds(settings, lambda: attend(*operands))
        whole = _seconds(settings, lambda: torch.autograd.grad(attend(*operands).sum(), operands))
        report.row(table, name, length, shown, 1e3 * seconds, 1e3 * whole)

    row("dense, scaled_dot_product_attention", 1.0, functional.scaled_dot_product_attention)
    patterns = {"fixed": FixedSparsityConfig(heads, block), "BigBird": BigBirdSparsityConfig(heads, block)}
    for name, pattern in patterns.items():
        sparse = SparseSelfAttention(pattern, max_seq_length=length).to(settings.device)
        row(f"sparse, {name}", float(sparse.get_layout(length).float().mean()), sparse)
