"""On a device a bucket becomes codes, and codes a bucket, in a few kernels whatever its size, with the host's bytes."""

from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed.comm.base import codec as codec_module
from deepspeed.comm.base.codec import CHUNK, Codec, Residual, coded_nbytes, decode, decode_add, encode
from deepspeed.comm.base.zero_rows import ZeroRows
from deepspeed.comm.codecs.coded import coded
from deepspeed.comm.codecs.one_bit import OneBitExchange, padded_numel
from deepspeed.comm.codecs.table import CODECS
from deepspeed.comm.job.job import Job
from deepspeed.comm.transports.transport import Reduction
from deepspeed.config.codec_names import GRADIENT_CODECS, PLAIN_CODECS
from deepspeed.config.sections.communication_compression import CommunicationCompression, Islands
from tests.harness.device import simulated_device

MOST = 40
WAYS: dict[str, Codec] = {
    "qwZ": CODECS["int8"].codec(feeds_back=False),
    "qgZ": CODECS["int4"].codec(feeds_back=False),
    **{name: row.codec() for name, row in CODECS.items()},
}
SLICE = 3 * CHUNK + 1000 * 8  # 3 chunks, and blocks of which the last one is not full


class Kernels(TorchDispatchMode):
    """Counts the operations that compute something: neither views nor allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        returns = func._schema.returns
        is_view = any(one.alias_info is not None and not one.alias_info.is_write for one in returns)
        if not is_view and not func._schema.name.startswith(("aten::empty", "aten::new_empty")):
            self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def kernels_of(work: Callable[[], Any]) -> int:
    with Kernels() as kernels:
        work()
    assert kernels.names
    return len(kernels.names)


def numbers(*shape: int) -> torch.Tensor:
    found = torch.randn(*shape, generator=torch.Generator().manual_seed(1))
    found[..., 5:9] = 0.0
    return found


@pytest.mark.parametrize("name", WAYS)
def test_few_kernels_and_the_hosts_bytes(name: str) -> None:
    ranks, values, error = 2, numbers(2, SLICE), 0.1 * numbers(2, SLICE).flip(1)
    codec = WAYS[name].fitted(values.view(-1), error.view(-1))
    on_host = {"codes": torch.zeros(ranks, coded_nbytes(codec, SLICE), dtype=torch.uint8), "error": error.clone()}
    encode(codec, values, on_host["error"], on_host["codes"])
    on_host["sum"], on_host["all"] = torch.ones(SLICE), torch.ones(ranks, SLICE, dtype=torch.bfloat16)
    decode_add(codec, on_host["codes"], on_host["sum"])
    decode(codec, on_host["codes"], on_host["all"])
    with simulated_device():
        there = {key: torch.zeros_like(value, device="cuda") for key, value in on_host.items()}
        there["error"].copy_(error)
        there["sum"].fill_(1.0)
        moved = values.to("cuda")
        encoding = kernels_of(lambda: encode(codec, moved, there["error"], there["codes"]))
        adding = kernels_of(lambda: decode_add(codec, there["codes"], there["sum"]))
        kernels_of(lambda: decode(codec, there["codes"], there["all"]))
        arrived = {key: value.cpu() for key, value in there.items()}
    assert encoding + adding <= MOST, (encoding, adding)
    if name in CODECS:  # what the planner counts
        assert encoding <= CODECS[name].work.kernels[0] and adding <= CODECS[name].work.kernels[1], (encoding, adding)
    for key, value in on_host.items():
        assert torch.equal(arrived[key], value), key


@pytest.mark.parametrize("name", WAYS)
def test_a_batch_has_a_limit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket that is longer than a batch takes several; the bytes stay what they are."""
    values = numbers(2, SLICE)
    codec = WAYS[name].fitted(values.view(-1), None)
    whole = torch.zeros(2, coded_nbytes(codec, SLICE), dtype=torch.uint8)
    encode(codec, values, None, whole)
    monkeypatch.setattr(codec_module, "DEVICE_ELEMENTS", 4 * CHUNK)  # two chunks of two slices
    with simulated_device():
        codes = torch.zeros_like(whole, device="cuda")
        encode(codec, values.to("cuda"), None, codes)
        out = torch.zeros(2, SLICE, device="cuda")
        decode(codec, codes, out)
        codes, out = codes.cpu(), out.cpu()
    expected = torch.zeros(2, SLICE)
    decode(codec, whole, expected)
    assert torch.equal(codes, whole) and torch.equal(out, expected)


def exchanged(device: str, name: str, numel: int) -> tuple[list[torch.Tensor], int]:
    """What an all-reduce of two ranks leaves, and the operations that it takes; the other rank has the same values."""
    plain = Job.adopt().axis_of().transport(device=torch.device(device))
    assert plain.size == 2
    length = numel // 2
    values = numbers(numel).to(device)
    error = Residual(torch.zeros(numel, device=device), torch.zeros(length, device=device))
    if name == "the 1-bit family":
        assert padded_numel(numel, 2) == numel

        def run() -> None:
            OneBitExchange(plain, values, numel, error, key=1, label="the test").finish()

        count = kernels_of(run)
        return [values.cpu(), error.sent.cpu()], count
    transport, out = coded(plain, WAYS[name]), torch.empty(numel, device=device)
    rows = None if WAYS[name].encodes_zero else ZeroRows(range(0, numel, 4), numel, 2, torch.device(device))
    how = Reduction(0.5, 1, "the test", numel, error=error if WAYS[name].feeds_back else None, rows=rows)
    count = kernels_of(lambda: transport.all_reduce(values, out, how).wait())
    return [out.cpu(), error.sent.cpu()], count


@pytest.mark.parametrize("name", [*WAYS, "the 1-bit family"])
def test_the_kernels_of_an_exchange_do_not_grow(name: str) -> None:
    counts = []
    for numel in (2 * (CHUNK + 64), 2 * (5 * CHUNK + 64)):
        with simulated_device(ranks=2):
            result, count = exchanged("cuda", name, numel)
        counts.append(count)
        assert all(bool(one.isfinite().all()) for one in result)
    assert counts[0] == counts[1]
    # Two times encoded and decoded, and the rows of zeros beside signs.
    assert counts[0] <= 2 * MOST + 30 + (70 if name == "sign" or name == "1-bit" else 0), counts


def test_the_configuration_names_the_codecs() -> None:
    def names(section: Any, key: str) -> set[str]:
        found: set[str] = set()
        for member in get_args(section.model_fields[key].annotation) or ():
            found |= {member} if isinstance(member, str) else {one for one in get_args(member) if isinstance(one, str)}
        return found

    assert names(CommunicationCompression, "gradients") == {*GRADIENT_CODECS, "auto"}
    assert names(CommunicationCompression, "warm_up") == {*PLAIN_CODECS}
    assert names(Islands, "wire") == {"fp32", "bf16", *PLAIN_CODECS}
    assert {*GRADIENT_CODECS, *PLAIN_CODECS} <= {*CODECS}
    assert all(row.codec().name == name for name, row in CODECS.items())
