"""The codecs: signs, and integers of 8 and 4 bits, each with a scale per block.

All work on any length and floating dtype, in plain torch on any device: signs are a comparison, integers round half to
even. A block whose values are not all finite gets a scale that is not finite, so what comes out of it is not either,
and it leaves an error of 0.

Sources: 1-bit SGD (Seide et al., 2014) for signs with error feedback; the mean of absolute values as the scale, which
is the best single one, from Karimireddy et al., arXiv 1901.09847; ZeRO++ (arXiv 2306.10209) for integers in blocks.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from deepspeed.comm.codec import CHUNK, Codec

BLOCK = 256
_SCALE = 4  # bytes of a scale, fp32
_PACK = 0x0102040810204080  # brings the lowest bits of eight bytes together in the highest byte
_SPREAD = 0x0101010101010101  # one byte in each of eight
_BITS = 0x8040201008040201 - (1 << 64)  # bit i of byte i, as a signed number
_ALMOST = 0x7F7F7F7F7F7F7F7F  # carries what is not 0 in a byte into its highest bit, and no further


def pack_signs(values: torch.Tensor, out: torch.Tensor) -> None:
    """Writes one bit for each value, 1 where it is not negative; bit *i* of a byte is the value number *i* of eight.

    Args:
        values: Floating, contiguous; the last dimension is a multiple of 8.
        out: Bytes, in the shape of ``values`` with an eighth of the last dimension.
    """
    eights = (values >= 0).view(torch.uint8).view(torch.int64)
    out.copy_(eights.mul(_PACK).bitwise_right_shift_(56))  # the low byte of each


def unpack_signs(body: torch.Tensor) -> torch.Tensor:
    """1.0 where :func:`pack_signs` found a value that is not negative, else -1.0; eight times as many, fp32."""
    # All eight bytes of a word at once: 0 or 1 for each bit, then 1 or -1.
    bits = body.to(torch.int64).mul_(_SPREAD).bitwise_and_(_BITS)
    bits.add_(_ALMOST).bitwise_right_shift_(7).bitwise_and_(_SPREAD)
    signs = bits.mul_(255).bitwise_not_().bitwise_or_(_SPREAD)
    return signs.view(torch.int8).view(*body.shape[:-1], -1).to(torch.float32)


class BlockCodec(Codec):
    """A codec with one fp32 scale per block: scales first, then the codes.

    Args:
        block: Elements with one scale, a multiple of 8 that divides ``CHUNK``.
        feeds_back: As of :class:`~deepspeed.comm.codec.Codec`.
    """

    def __init__(self, block: int = BLOCK, *, feeds_back: bool = True) -> None:
        if block <= 0 or block % 8 or CHUNK % block:
            raise ValueError(f"block {block}: expected a multiple of 8 that divides {CHUNK}")
        self.block = block
        self.feeds_back = feeds_back

    bits = 8

    def nbytes(self, numel: int) -> int:
        """See the class this one derives from."""
        return -(-numel // self.block) * _SCALE + -(-numel // 8) * self.bits

    def encode(self, chunk: torch.Tensor, error: torch.Tensor | None, codes: torch.Tensor) -> None:
        """See the class this one derives from."""
        for elements, scales, body in self._parts(chunk.numel(), codes):
            self._encode(chunk[elements], None if error is None else error[elements], scales, body)

    def decode_add(self, codes: torch.Tensor, out: torch.Tensor, factor: float) -> None:
        """See the class this one derives from."""
        for elements, scales, body in self._parts(out.numel(), codes):
            said = self._said(scales, body).view(-1)
            place = out[elements]
            place.add_(said[: place.numel()], alpha=factor)

    def _parts(self, numel: int, codes: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """The whole blocks, then the rest: which elements, their scales as a column, their codes as rows."""
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
        self._write(rows, scales, body)
        if error is not None:
            due.sub_(self._said(scales, body).view(-1)[:numel])
            if values.device.type != "cpu" or not bool(scales.isfinite().all()):
                due.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
            self._keep(error, due)

    def _keep(self, error: torch.Tensor, lost: torch.Tensor) -> None:
        """Replaces the error by what the next call is to add, of which ``lost`` was lost now."""
        error.copy_(lost)

    def _scale(self, rows: torch.Tensor, length: int, scales: torch.Tensor) -> None:
        """Writes the scale of each row; what it has beyond ``length`` elements are zeros that count for nothing."""
        raise NotImplementedError

    def _write(self, rows: torch.Tensor, scales: torch.Tensor, body: torch.Tensor) -> None:
        """Writes the codes of the rows, which are left as they are."""
        raise NotImplementedError

    def _said(self, scales: torch.Tensor, body: torch.Tensor) -> torch.Tensor:
        """What codes stand for, as rows."""
        raise NotImplementedError


class SignCodec(BlockCodec):
    """One bit for each value, and the mean of absolute values per block; the sign of 0 is +."""

    name = "sign"
    bits = 1
    says_zero = False

    def _scale(self, rows: torch.Tensor, length: int, scales: torch.Tensor) -> None:
        torch.div(torch.linalg.vector_norm(rows, 1, dim=1, keepdim=True), length, out=scales)

    def _write(self, rows: torch.Tensor, scales: torch.Tensor, body: torch.Tensor) -> None:
        pack_signs(rows, body)

    def _said(self, scales: torch.Tensor, body: torch.Tensor) -> torch.Tensor:
        return unpack_signs(body).mul_(scales)


class WholeSignCodec(SignCodec):
    """One bit for each value, and one scale for a whole tensor, the root of its mean square.

    So do the published algorithms of the 1-bit family (arXiv 2102.02888). The scale is that of all values that are
    encoded together, the padding between them included (:meth:`fitted`).
    """

    name = "1-bit"

    def __init__(self, *, feeds_back: bool = True, scale: torch.Tensor | None = None) -> None:
        super().__init__(CHUNK, feeds_back=feeds_back)
        self._fixed = scale

    def fitted(self, values: torch.Tensor, error: torch.Tensor | None) -> Codec:
        """See the class this one derives from."""
        if self._fixed is not None or values.numel() == 0:
            return self
        squares = torch.zeros((), dtype=torch.float64, device=values.device)
        for start in range(0, values.numel(), CHUNK):
            due = values[start : start + CHUNK].float()
            if error is not None:
                due = due + error[start : start + CHUNK]
            squares += torch.linalg.vector_norm(due).double().square()
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
        torch.div(largest, float(self.most), out=scales)

    def _rounded(self, rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        # By the scale that travels, which may round to 0 under values that are almost nothing.
        steps = torch.where(scales > 0, rows / scales, 0.0)
        return steps.round_().clamp_(-self.most, self.most).nan_to_num_(nan=0.0).to(torch.int8)


class Int8Codec(IntegerCodec):
    """Eight bits for each value."""

    name = "int8"
    bits = 8

    def _write(self, rows: torch.Tensor, scales: torch.Tensor, body: torch.Tensor) -> None:
        body.view(torch.int8).copy_(self._rounded(rows, scales))

    def _said(self, scales: torch.Tensor, body: torch.Tensor) -> torch.Tensor:
        return body.view(torch.int8).float().mul_(scales)


class Int4Codec(IntegerCodec):
    """Four bits for each value: two in a byte, the first in the low half."""

    name = "int4"
    bits = 4
    most = 7

    def _write(self, rows: torch.Tensor, scales: torch.Tensor, body: torch.Tensor) -> None:
        pairs = self._rounded(rows, scales).view(body.shape[0], -1, 2)
        body.view(torch.int8).copy_((pairs[..., 0] & 15) | (pairs[..., 1] << 4))

    def _said(self, scales: torch.Tensor, body: torch.Tensor) -> torch.Tensor:
        pairs = body.view(torch.int8)
        both = torch.stack(((pairs << 4) >> 4, pairs >> 4), dim=-1)
        return both.view(body.shape[0], -1).float().mul_(scales)


class LocoCodec(Int4Codec):
    """Four bits for each value, with an error that is a running average of what was lost: `LoCo
    <https://arxiv.org/abs/2407.04480>`_: ``e <- beta e + (1 - beta) (g + e - what travelled)``.

    Args:
        beta: Between 0, where all that was lost is added to the next values, and 1, where the error stays as it is.
        block: As of :class:`BlockCodec`.
    """  # noqa: D205 - the title holds its reference

    def __init__(self, beta: float, block: int = BLOCK) -> None:
        super().__init__(block)
        self.beta = beta

    def _keep(self, error: torch.Tensor, lost: torch.Tensor) -> None:
        error.mul_(self.beta).add_(lost, alpha=1.0 - self.beta)
