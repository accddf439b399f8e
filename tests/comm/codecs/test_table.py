"""Codecs against a slow reference that goes element by element, and what error feedback makes of them."""

import random

import numpy
import pytest
import torch

from deepspeed.comm.base.codec import CHUNK, coded_nbytes, decode, decode_add, encode
from deepspeed.comm.codecs.table import BLOCK, CODECS, BlockCodec, IntegerCodec, SignCodec, WholeSignCodec
from deepspeed.config.codec_names import GRADIENT_CODECS, PLAIN_CODECS

KINDS = [CODECS[name].make for name in GRADIENT_CODECS]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def kinds_of(kind: type[BlockCodec]) -> set[type[BlockCodec]]:
    """The subclasses that have a name, of any depth."""
    own = {one for one in kind.__subclasses__() if "name" in vars(one)}
    return own.union(*map(kinds_of, kind.__subclasses__()))


def test_every_codec_has_one_row_under_its_name() -> None:
    assert {kind.name: kind for kind in kinds_of(BlockCodec)} == {
        name: type(row.codec()) for name, row in CODECS.items()
    }


def test_the_names_that_a_configuration_may_give_are_those_of_rows() -> None:
    chosen_by_other_settings = {"loco", "1-bit"}  # zeropp_loco_param, and the optimizers of the 1-bit family
    assert set(PLAIN_CODECS) <= set(GRADIENT_CODECS) == set(CODECS) - chosen_by_other_settings


def through(codec: BlockCodec, values: torch.Tensor, error: torch.Tensor | None = None) -> torch.Tensor:
    codes = torch.randint(0, 256, (coded_nbytes(codec, values.numel()),), dtype=torch.uint8)  # nothing left to luck
    encode(codec, values, error, codes)
    out = torch.full((values.numel(),), 7.0)
    decode(codec, codes, out)
    return out


def by_hand(codec: BlockCodec, values: torch.Tensor) -> torch.Tensor:
    """The definition, block by block and element by element, in numpy's fp32."""
    found = []
    array = values.float().numpy()
    for start in range(0, len(array), codec.block):
        block = array[start : start + codec.block]
        if isinstance(codec, SignCodec):
            scale = numpy.abs(block).sum(dtype=numpy.float64) / len(block)
            found += [scale if value >= 0 else -scale for value in block]
            continue
        scale = numpy.float32(numpy.abs(block).max() * numpy.float32(1 / codec.most))
        for value in block:
            step = int(numpy.round(value / scale)) if scale > 0 else 0  # half to even
            found.append(max(-codec.most, min(codec.most, step)) * scale)
    return torch.tensor(found, dtype=torch.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_definition_for_any_length(kind: type[BlockCodec]) -> None:
    numbers = random.Random(4)
    made = torch.Generator().manual_seed(5)
    for round_ in range(1000):
        numel = (
            numbers.choice((0, 1, 7, 8, BLOCK - 1, BLOCK, BLOCK + 1)) if round_ % 10 == 0 else numbers.randrange(700)
        )
        codec = kind(numbers.choice((8, 64, BLOCK)))
        values = torch.randn(numel, generator=made) * 10.0 ** numbers.randrange(-6, 4)  # fp16 holds them
        values[torch.rand(numel, generator=made) < 0.1] = 0.0
        values = values.to(DTYPES[round_ % 3])
        exact = isinstance(codec, IntegerCodec)
        # A sum of a block in another order differs in its last bits; integers times a scale do not.
        tolerance = 0.0 if exact else 2e-6
        torch.testing.assert_close(through(codec, values), by_hand(codec, values), rtol=tolerance, atol=0.0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks_are_as_one_chunk(kind: type[BlockCodec], dtype: torch.dtype) -> None:
    values = torch.randn(2 * CHUNK + 3 * BLOCK + 5, dtype=torch.float32).to(dtype)
    whole, codec = through(kind(), values), kind()
    for first in (0, CHUNK, 2 * CHUNK):
        part = values[first : first + CHUNK]
        assert torch.equal(whole[first : first + CHUNK], through(codec, part))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_so(kind: type[BlockCodec], bad: float) -> None:
    values = torch.randn(3 * BLOCK)
    values[BLOCK + 3] = bad
    error = torch.randn(3 * BLOCK)
    out = through(kind(), values, error)
    assert not bool(out[BLOCK + 3].isfinite())
    assert bool(out[:BLOCK].isfinite().all()) and bool(out[2 * BLOCK :].isfinite().all())
    assert bool(error.isfinite().all()) and not bool(error[BLOCK : 2 * BLOCK].any())


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_lost_for_good(kind: type[BlockCodec]) -> None:
    """What was sent so far and the error together are what there was; without the error it drifts away."""
    made = torch.Generator().manual_seed(6)
    bias = torch.randn(1000, generator=made)
    error, total, decoded, without = (torch.zeros(1000) for _ in range(4))
    codec = kind()
    for _ in range(300):
        values = bias + 0.5 * torch.randn(1000, generator=made)
        total += values
        decoded += through(codec, values, error)
        without += through(codec, values)
    torch.testing.assert_close(decoded + error, total, rtol=1e-4, atol=1e-2)
    if kind is SignCodec:
        assert (decoded - total).norm() < 0.35 * (without - total).norm()


@pytest.mark.parametrize("kind", KINDS)
def test_decoded_values_are_added(kind: type[BlockCodec]) -> None:
    values, codec = torch.randn(777), kind()
    codes = torch.empty(coded_nbytes(codec, 777), dtype=torch.uint8)
    encode(codec, values, None, codes)
    out = torch.ones(777)
    decode_add(codec, codes, out)
    torch.testing.assert_close(out, 1.0 + through(codec, values))


def test_sizes() -> None:
    for kind in KINDS:  # a scale of 32 bits beside each block
        assert kind().nbytes(CHUNK) * 8 / CHUNK == kind().bits + 32 / BLOCK
    with pytest.raises(ValueError, match="multiple of 8"):
        SignCodec(12)


def test_one_sign_scale_is_that_of_values_and_error_feedback() -> None:
    """The root of the mean square, over more than one chunk."""
    values, error = torch.randn(2, CHUNK + 3, generator=torch.Generator().manual_seed(0))
    for feedback, due in ((None, values), (error, values + error)):
        scale = WholeSignCodec().fitted(values, feedback)._fixed
        torch.testing.assert_close(scale, due.square().mean().sqrt(), rtol=1e-5, atol=0)
