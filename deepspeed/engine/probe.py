"""How long a reduction takes on the links of this job, as it is and as codes (``communication_compression: auto``)."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from deepspeed.comm.codecs.codec import Codec, Residual
from deepspeed.comm.codecs.coded import coded
from deepspeed.comm.transports.transport import Reduction, Transport, transfer_key

NUMEL = 1 << 20
"""Elements that are reduced. On a link of 100 Mbit/s that takes about a third of a second."""

_ROUNDS = 3  # the first of them is not counted
_BUCKET = (1 << 15) - 1  # a number that no bucket has


def seconds(
    transport: Transport, codecs: Sequence[Codec], dtype: torch.dtype, device: torch.device, *, to_owner: bool
) -> list[float]:
    """Seconds of one reduction without a codec, then with each; the slowest rank's. Every rank must call it.

    Args:
        transport: Carries gradients.
        codecs: What is tried.
        dtype: Dtype in which gradients are sent.
        device: Where they are.
        to_owner: As the engine reduces them.
    """
    length = -(-NUMEL // (64 * transport.size)) * 64
    flat = torch.randn(length * transport.size, device=device).to(dtype)
    out = torch.empty(length if to_owner else flat.numel(), device=device)
    best = []
    count = 0
    for codec in (None, *codecs):
        candidate = coded(transport, codec)
        error = None
        if codec is not None and codec.feeds_back:
            owned = None if to_owner else torch.zeros(length, device=device)
            error = Residual(torch.zeros(flat.numel(), device=device), owned)
        took = []
        for _ in range(_ROUNDS):
            transport.gather_small(torch.zeros(1), channel="call", label="the measurement of the link")
            count += 1
            key = transfer_key(transport.owner, _BUCKET, 1, count)
            how = Reduction(1.0, key, "the measurement of the link", NUMEL, error=error)
            started = time.perf_counter()
            (candidate.reduce_scatter if to_owner else candidate.all_reduce)(flat.clone(), out, how).wait()
            if device.type != "cpu":
                torch.accelerator.synchronize()
            took.append(time.perf_counter() - started)
        best.append(min(took[1:]))
    label = "the measurement of the link"
    rows = transport.gather_small(torch.tensor(best, dtype=torch.float64), channel="call", label=label)
    return [float(slowest) for slowest in rows.max(dim=0).values]
