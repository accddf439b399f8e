"""The codecs: signs, and integers of 8 and 4 bits, each with a scale per block.

All work on any length and floating dtype, in plain torch on any device: signs are a comparison, integers round half to
even. A block whose values are not all finite gets a scale that is not finite, so it decodes to values that are not
finite, and leaves an error of 0.

Sources: 1-bit SGD (Seide et al., 2014) for signs with error feedback; the mean of absolute values as the scale, which
is the best single one, from Karimireddy et al., arXiv 1901.09847; ZeRO++ (arXiv 2306.10209) for integers in blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from typing_extensions import override

from deepspeed.comm.base.codec import CHUNK, DEVICE_ELEMENTS, Codec, aligned_nbytes

BLOCK = 256
_SCALE = 4  # bytes of a scale, fp32
_PACK = 0x0102040810204080  # brings the lowest bits of eight bytes together in the highest byte
_SPREAD = 0x0101010101010101  # one byte in each of eight
_BITS = 0x8040201008040201 - (1 << 64)  # bit i of byte i, as a signed number
_ALMOST = 0x7F7F7F7F7F7F7F7F  # carries what is not 0 in a byte into its highest bit, and no further


def pack_signs(values: torch.Tensor) -> torch.Tensor:
    """Returns one bit for each value, 1 where it is not negative; bit *i* of a byte is the value number *i* of eight.

    Bytes ``[..., n // 8]`` for floating ``values`` ``[..., n]``, where 8 divides n.
    """
    eights = torch.ge(values, 0).contiguous().view(torch.int64)
    return eights.mul_(_PACK).bitwise_right_shift_(56).to(torch.uint8)  # the low byte of each


def unpack_signs(body: torch.Tensor) -> torch.Tensor:
    """Returns bools ``[..., 8 * n]`` of bytes ``[..., n]``: True where :func:`pack_signs` saw no negative value."""
    # All eight bytes of a word at once: 0 or 1 for each bit.
    bits = body.to(torch.int64).mul_(_SPREAD).bitwise_and_(_BITS)
    bits.add_(_ALMOST).bitwise_right_shift_(7).bitwise_and_(_SPREAD)
    return bits.view(torch.bool).view(*body.shape[:-1], -1)


def decode_signs(body: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Returns ``scale`` where :func:`pack_signs` saw a value that is not negative, else ``-scale``: ``[..., 8 * n]``.

    ``scale`` (fp32) broadcasts to that shape.
    """
    return torch.where(unpack_signs(body), scale, -scale)


class BlockCodec(Codec):
    """A codec with one fp32 scale per block: scales first, then the codes.

    Args:
        block: Elements with one scale, a multiple of 8 that divides ``CHUNK``.
        feeds_back: Whether reductions keep what is lost for the next one (error feedback).

    Raises:
        ValueError: ``block`` is no such multiple.
    """

    def __init__(self, block: int = BLOCK, *, feeds_back: bool = True) -> None:
        if block <= 0 or block % 8 or CHUNK % block:
            raise ValueError(f"block {block}: expected a multiple of 8 that divides {CHUNK}")
        self.block = block
        self.feeds_back = feeds_back

    bits = 8
    is_of_length = False
    """Whether the scale of a block depends on its number of elements, besides their values."""

    @override
    def nbytes(self, numel: int) -> int:
        return -(-numel // self.block) * _SCALE + -(-numel // 8) * self.bits

    @override
    def encode(self, chunk: torch.Tensor, error: torch.Tensor | None, codes: torch.Tensor) -> None:
        for elements, scales, body in self._parts(chunk.numel(), codes):
            self._encode(chunk[elements], None if error is None else error[elements], scales, body)

    @override
    def decode_add(self, codes: torch.Tensor, out: torch.Tensor) -> None:
        for elements, scales, body in self._parts(out.numel(), codes):
            decoded = self._decode_block(scales, body).view(-1)
            place = out[elements]
            place.add_(decoded[: place.numel()])

    def _parts(self, numel: int, codes: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Yields the whole blocks, then the rest: which elements, their scales as a column, their codes as rows."""
        blocks, full = -(-numel // self.block), numel // self.block * self.block
        heads = codes[: blocks * _SCALE].view(torch.float32).view(blocks, 1)
        codes = codes[blocks * _SCALE : self.nbytes(numel)]
        if full:
            rows = full // self.block
            yield slice(0, full), heads[:rows], codes[: full * self.bits // 8].view(rows, -1)
        if full < numel:
            yield slice(full, numel), heads[-1:], codes[full * self.bits // 8 :].view(1, -1)

    def _encode(
        self, values: torch.Tensor, error: torch.Tensor | None, scales: torch.Tensor, body: torch.Tensor
    ) -> None:
        numel, width = values.numel(), body.shape[1] * 8 // self.bits
        rows = torch.empty((body.shape[0], width), dtype=torch.float32, device=values.device)
        flat = rows.view(-1)
        flat[numel:].zero_()  # fewer than 8
        due = flat[:numel]
        if error is None:
            due.copy_(values)
        else:
            torch.add(error, values, out=due)
        self._scale(rows, -(-numel // body.shape[0]), scales)
        body.copy_(self._pack(rows, scales))
        if error is not None:
            due.sub_(self._decode_block(scales, body).view(-1)[:numel])
            if not bool(scales.isfinite().all()):
                due.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
            self._keep(error, due)

    @override
    def encode_slices(self, values: torch.Tensor, error: torch.Tensor | None, codes: torch.Tensor) -> None:
        slices, numel = values.shape
        blocks = -(-numel // self.block)
        rows = values.new_empty((slices, blocks * self.block), dtype=torch.float32)
        if rows.shape[1] > numel:
            rows[:, numel:].zero_()
        due = rows[:, :numel]
        if error is None:
            due.copy_(values)
        else:
            torch.add(error, values, out=due)
        blocked = rows.view(-1, self.block)
        scales = rows.new_empty((blocked.shape[0], 1))
        self._scale(blocked, self.block, scales)
        if self.is_of_length and numel % self.block:
            first, last = (blocks - 1) * self.block, -(-numel // 8) * 8
            self._scale(rows[:, first:last], numel - first, scales.view(slices, blocks)[:, -1:])
        bodies = self._pack(blocked, scales)
        for there, here in self._places(codes, scales.view(slices, -1), bodies.view(slices, -1), numel):
            there.copy_(here)
        if error is not None:
            due.sub_(self._decode_block(scales, bodies).view(slices, -1)[:, :numel])
            self._keep(error, due.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0))

    @override
    def decode_slices(self, codes: torch.Tensor, numel: int) -> torch.Tensor:
        slices, blocks = codes.shape[0], -(-numel // self.block)
        scales = codes.new_empty((slices, blocks), dtype=torch.float32)
        bodies = codes.new_empty((slices, blocks * self.block * self.bits // 8))
        if numel % self.block:
            bodies[:, -(-numel // 8) * self.bits :].zero_()
        for there, here in self._places(codes, scales, bodies, numel):
            here.copy_(there)
        decoded = self._decode_block(scales.view(-1, 1), bodies.view(slices * blocks, -1))
        return decoded.view(slices, -1)[:, :numel]

    def _places(
        self, codes: torch.Tensor, scales: torch.Tensor, bodies: torch.Tensor, numel: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields pairs of views of equal shape: in the codes, and in the scales or bodies of all blocks.

        ``codes`` ``[slices, bytes]`` are chunks: of each its scales, its bodies, and bytes that align the next one.
        ``scales`` are ``[slices, blocks]``, ``bodies`` ``[slices, bytes of all blocks]``, ``numel`` is that of a slice.
        """
        full, rest = divmod(numel, CHUNK)
        blocks, head, each = CHUNK // self.block, CHUNK // self.block * _SCALE, CHUNK * self.bits // 8
        nbytes = aligned_nbytes(self, CHUNK)
        if full:
            chunks = codes[:, : full * nbytes].unflatten(1, (full, nbytes))
            yield chunks[..., :head].view(torch.float32), scales[:, : full * blocks].unflatten(1, (full, blocks))
            yield chunks[..., head : head + each], bodies[:, : full * each].unflatten(1, (full, each))
        if rest:
            last = codes[:, full * nbytes :]
            head, each, start = -(-rest // self.block) * _SCALE, -(-rest // 8) * self.bits, full * each
            yield last[:, :head].view(torch.float32), scales[:, full * blocks :]
            yield last[:, head : head + each], bodies[:, start : start + each]

    def _keep(self, error: torch.Tensor, lost: torch.Tensor) -> None:
        """Replaces the error by what the next call must add; ``lost`` is the error of this call."""
        error.copy_(lost)

    def _scale(self, rows: torch.Tensor, length: int, scales: torch.Tensor) -> None:
        """Writes the scale of each row; elements beyond ``length`` are padding (zeros)."""
        raise NotImplementedError

    def _pack(self, rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Returns the codes of the rows as rows of bytes; ``rows`` are left as they are."""
        raise NotImplementedError

    def _decode_block(self, scales: torch.Tensor, body: torch.Tensor) -> torch.Tensor:
        """Decodes codes to rows of values."""
        raise NotImplementedError


class SignCodec(BlockCodec):
    """One bit for each value, and the mean of absolute values per block; the sign of 0 is +."""

    name = "sign"
    bits = 1
    encodes_zero = False
    is_of_length = True

    def _scale(self, rows: torch.Tensor, length: int, scales: torch.Tensor) -> None:
        torch.div(torch.linalg.vector_norm(rows, 1, dim=1, keepdim=True), length, out=scales)

    def _pack(self, rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return pack_signs(rows)

    def _decode_block(self, scales: torch.Tensor, body: torch.Tensor) -> torch.Tensor:
        return decode_signs(body, scales)


def chunk_norms(values: torch.Tensor) -> torch.Tensor:
    """Returns the l2 norms of the chunks of ``values`` (1-D, contiguous), whose last one may be shorter; 1-D."""
    full = values.numel() // CHUNK * CHUNK
    norms = torch.linalg.vector_norm(values[:full].view(-1, CHUNK), dim=1)
    if full == values.numel():
        return norms
    return torch.cat([norms, torch.linalg.vector_norm(values[full:].view(1, -1), dim=1)])


class WholeSignCodec(SignCodec):
    """One bit for each value, and one scale for a whole tensor, the root of its mean square.

    So do the published algorithms of the 1-bit family (arXiv 2102.02888). The scale is that of all values that are
    encoded together, the padding between them included (:meth:`fitted`).
    """

    name = "1-bit"
    is_of_length = False

    def __init__(self, *, feeds_back: bool = True, scale: torch.Tensor | None = None) -> None:
        super().__init__(CHUNK, feeds_back=feeds_back)
        self._fixed = scale

    @override
    def fitted(self, values: torch.Tensor, error: torch.Tensor | None) -> Codec:
        if self._fixed is not None or values.numel() == 0:
            return self
        squares = torch.zeros((), dtype=torch.float64, device=values.device)
        length = CHUNK if values.device.type == "cpu" else DEVICE_ELEMENTS
        for start in range(0, values.numel(), length):
            due = values[start : start + length].float()
            if error is not None:
                due = due + error[start : start + length]
            squares += chunk_norms(due).double().square_().sum()
        scale = squares.div_(values.numel()).sqrt_().float()
        return WholeSignCodec(feeds_back=self.feeds_back, scale=scale)

    def _scale(self, rows: torch.Tensor, length: int, scales: torch.Tensor) -> None:
        assert self._fixed is not None, "encoded without a look at all values"
        scales.copy_(self._fixed)


class IntegerCodec(BlockCodec):
    """Integers between ``-most`` and ``most`` times a scale per block, by the block's largest absolute value."""

    most = 127

    def _scale(self, rows: torch.Tensor, length: int, scales: torch.Tensor) -> None:
        largest = rows.abs().amax(dim=1, keepdim=True)  # NaN where there is one
        # A GPU divides by a constant by multiplying with its inverse, so do that everywhere for equal bits.
        torch.mul(largest, 1.0 / self.most, out=scales)

    def _rounded(self, rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        # Divide by the scale that is sent. It may round to 0 for tiny values, which then become 0, as do values that
        # are not finite.
        steps = torch.div(rows, scales).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        return steps.round_().clamp_(-self.most, self.most).to(torch.int8)


class Int8Codec(IntegerCodec):
    """Eight bits for each value."""

    name = "int8"
    bits = 8

    def _pack(self, rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return self._rounded(rows, scales).view(torch.uint8)

    def _decode_block(self, scales: torch.Tensor, body: torch.Tensor) -> torch.Tensor:
        return torch.mul(body.view(torch.int8), scales)


class Int4Codec(IntegerCodec):
    """Four bits for each value: two in a byte, the first in the low half."""

    name = "int4"
    bits = 4
    most = 7

    def _pack(self, rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        pairs = self._rounded(rows, scales).view(rows.shape[0], -1, 2)
        return (pairs[..., 1] << 4).bitwise_or_(pairs[..., 0] & 15).view(torch.uint8)

    def _decode_block(self, scales: torch.Tensor, body: torch.Tensor) -> torch.Tensor:
        pairs = body.view(torch.int8)
        both = torch.stack(((pairs << 4).bitwise_right_shift_(4), pairs >> 4), dim=-1)
        return torch.mul(both.view(body.shape[0], -1), scales)


class LocoCodec(Int4Codec):
    """Four bits for each value, with an error that is a running average of what was lost: `LoCo
    <https://arxiv.org/abs/2407.04480>`_: ``e <- beta e + (1 - beta) (g + e - what was sent)``.

    ``beta`` 0 adds the whole last error to the next values; 1 never changes the error.
    """  # noqa: D205 - the title holds its reference

    name = "loco"

    def __init__(self, block: int = BLOCK, *, beta: float = 0.8, feeds_back: bool = True) -> None:
        super().__init__(block, feeds_back=feeds_back)
        self.beta = beta

    def _keep(self, error: torch.Tensor, lost: torch.Tensor) -> None:
        error.mul_(self.beta).add_(lost, alpha=1.0 - self.beta)


@dataclass(frozen=True)
class CodecWork:
    """The costs of a codec: pairs of encoding and decoding."""

    # time per element on one CPU core, as ``benchmarks/compression.py codec`` measures it
    nanoseconds: tuple[float, float]
    kernels: tuple[int, int]  # started on a device per batch of ``comm.codecs.codec.DEVICE_ELEMENTS`` elements
    nbytes: tuple[float, float]  # bytes that these kernels read and write per element


@dataclass(frozen=True)
class CodecRow:
    """One codec that a configuration can choose, with its defaults."""

    make: Callable[..., BlockCodec]  # the class
    # Elements with one scale. Blocks of signs are long, so that scales add little: 1.016 bits an element. Blocks of
    # integers are short, as elements much smaller than the block's largest are lost.
    block: int
    feeds_back: bool  # whether gradients get error feedback
    work: CodecWork  # with these defaults

    def codec(self, *, block: int | None = None, feeds_back: bool | None = None, **settings: Any) -> BlockCodec:
        """Returns the codec; None stands for the default. ``settings`` are those of its class alone."""
        feeds_back = self.feeds_back if feeds_back is None else feeds_back
        return self.make(block or self.block, feeds_back=feeds_back, **settings)


CODECS: dict[str, CodecRow] = {
    "int8": CodecRow(Int8Codec, BLOCK, False, CodecWork((1.9, 0.5), (18, 8), (62.0, 28.0))),
    "int4": CodecRow(Int4Codec, BLOCK, True, CodecWork((4.2, 1.2), (25, 12), (110.0, 32.0))),
    "loco": CodecRow(LocoCodec, BLOCK, True, CodecWork((4.2, 1.2), (26, 12), (122.0, 32.0))),
    "sign": CodecRow(SignCodec, 2048, True, CodecWork((3.2, 0.8), (25, 15), (77.0, 37.0))),
    "1-bit": CodecRow(
        lambda _block, **settings: WholeSignCodec(**settings),
        CHUNK,
        True,
        CodecWork((3.2, 0.8), (22, 15), (77.0, 37.0)),
    ),
}
"""By name. ``config.codec_names`` lists those that a configuration chooses by name; settings of ZeRO++ and optimizers
choose the others."""
