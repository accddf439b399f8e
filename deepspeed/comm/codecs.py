"""The codecs: signs, and integers of 8 and 4 bits, each with a scale per block.

All work on any length and floating dtype, in plain torch on any device: signs are a comparison, integers round half to
even. A block whose values are not all finite gets a scale that is not finite, so what comes out of it is not either,
and it leaves an error of 0.

Sources: 1-bit SGD (Seide et al., 2014) for signs with error feedback; the mean of absolute values as the scale, which
is the best single one, from Karimireddy et al., arXiv 1901.09847; ZeRO++ (arXiv 2306.10209) for integers in blocks.
"""

from __future__ import annotations

import torch

from deepspeed.comm.codec import CHUNK, Codec

BLOCK = 256
_SCALE = 4  # bytes of a scale, fp32
_PACK = 0x0102040810204080  # brings the lowest bits of eight bytes together in the highest byte
_SPREAD = 0x0101010101010101  # one byte in each of eight
_BITS = 0x8040201008040201 - (1 << 64)  # bit i of byte i, as a signed number


class BlockCodec(Codec):
    """A codec with one fp32 scale per block: scales first, then the codes of whole blocks.

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
        blocks = -(-numel // self.block)
        return blocks * (_SCALE + self.block * self.bits // 8)

    def encode(self, chunk: torch.Tensor, error: torch.Tensor | None, codes: torch.Tensor) -> None:
        """See the class this one derives from."""
        rows, scales, body = self._parts(chunk.numel(), codes, chunk.device)
        flat = rows.view(-1)[: chunk.numel()]
        flat.copy_(chunk)
        if error is not None:
            flat.add_(error)
        self._scale(rows, chunk.numel(), scales)
        self._write(rows, scales, body)
        if error is not None:
            said = torch.zeros_like(rows)
            self._add(body, scales, said)
            lost = flat - said.view(-1)[: chunk.numel()]
            self._keep(error, lost.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0))

    def decode_add(self, codes: torch.Tensor, out: torch.Tensor, factor: float) -> None:
        """See the class this one derives from."""
        rows, scales, body = self._parts(out.numel(), codes, out.device)
        self._add(body, scales, rows)
        out.add_(rows.view(-1)[: out.numel()], alpha=factor)

    def _parts(
        self, numel: int, codes: torch.Tensor, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Zeros as rows of one block each, the scales as a column, and the codes as rows."""
        blocks = -(-numel // self.block)
        rows = torch.zeros((blocks, self.block), dtype=torch.float32, device=device)
        head = blocks * _SCALE
        scales = codes[:head].view(torch.float32).view(blocks, 1)
        return rows, scales, codes[head : self.nbytes(numel)].view(blocks, -1)

    def _keep(self, error: torch.Tensor, lost: torch.Tensor) -> None:
        """Replaces the error by what the next call is to add, of which ``lost`` was lost now."""
        error.copy_(lost)

    def _scale(self, rows: torch.Tensor, numel: int, scales: torch.Tensor) -> None:
        """Writes the scale of each row; those beyond ``numel`` elements are zeros that count for nothing."""
        raise NotImplementedError

    def _write(self, rows: torch.Tensor, scales: torch.Tensor, body: torch.Tensor) -> None:
        """Writes the codes of the rows, which may be changed only by dividing them by their scales."""
        raise NotImplementedError

    def _add(self, body: torch.Tensor, scales: torch.Tensor, rows: torch.Tensor) -> None:
        """Overwrites rows of zeros with what the codes stand for."""
        raise NotImplementedError


class SignCodec(BlockCodec):
    """One bit for each value, and the mean of absolute values per block; the sign of 0 is +."""

    name = "sign"
    bits = 1

    def _scale(self, rows: torch.Tensor, numel: int, scales: torch.Tensor) -> None:
        counts = torch.full_like(scales, self.block)
        if numel % self.block:
            counts[-1] = numel % self.block
        torch.div(torch.linalg.vector_norm(rows, 1, dim=1, keepdim=True), counts, out=scales)

    def _write(self, rows: torch.Tensor, scales: torch.Tensor, body: torch.Tensor) -> None:
        eights = (rows >= 0).view(torch.uint8).view(torch.int64)
        body.copy_(((eights * _PACK) >> 56).to(torch.uint8))

    def _add(self, body: torch.Tensor, scales: torch.Tensor, rows: torch.Tensor) -> None:
        spread = (body.to(torch.int64) * _SPREAD) & _BITS
        is_positive = spread.view(torch.uint8).view(rows.shape) != 0
        rows.copy_(torch.where(is_positive, scales, -scales))


class IntegerCodec(BlockCodec):
    """Integers between ``-most`` and ``most`` times a scale per block, by the block's largest absolute value."""

    most = 127

    def _scale(self, rows: torch.Tensor, numel: int, scales: torch.Tensor) -> None:
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

    def _add(self, body: torch.Tensor, scales: torch.Tensor, rows: torch.Tensor) -> None:
        torch.mul(body.view(torch.int8).float(), scales, out=rows)


class Int4Codec(IntegerCodec):
    """Four bits for each value: two in a byte, the first in the low half."""

    name = "int4"
    bits = 4
    most = 7

    def _write(self, rows: torch.Tensor, scales: torch.Tensor, body: torch.Tensor) -> None:
        pairs = self._rounded(rows, scales).view(body.shape[0], -1, 2)
        body.view(torch.int8).copy_((pairs[..., 0] & 15) | (pairs[..., 1] << 4))

    def _add(self, body: torch.Tensor, scales: torch.Tensor, rows: torch.Tensor) -> None:
        pairs = body.view(torch.int8)
        both = torch.stack(((pairs << 4) >> 4, pairs >> 4), dim=-1)
        torch.mul(both.view(rows.shape).float(), scales, out=rows)


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
