"""Products of block-sparse matrices: the two products of attention, for programs that combine them themselves."""

from __future__ import annotations

import torch

MODES = ("sdd", "dsd", "dds")


class MatMul:
    """A product in which one of result, left and right factor is block-sparse.

    Letters of the mode stand for result, left, right: ``sdd`` computes only the blocks of the layout. A block-sparse
    matrix is ``[batch, entries, block, block]``, its entries in the order of ``layout.nonzero()``.

    Args:
        layout: ``[heads, rows, columns]`` or ``[rows, columns]`` of 0 and 1.
        mode: ``sdd``, ``dsd`` or ``dds``.
        trans_a: The left factor is given transposed.
        trans_b: The right factor is given transposed.
        bench: Accepted for old programs; nothing is timed.

    Raises:
        ValueError: The layout has another number of dimensions.
    """

    def __init__(
        self,
        layout: torch.Tensor,
        block: int,
        mode: str,
        trans_a: bool = False,
        trans_b: bool = False,
        bench: bool = False,
    ) -> None:
        if mode not in MODES:
            raise NotImplementedError(f"mode={mode!r}: expected one of {', '.join(MODES)}")
        layout = layout.unsqueeze(0) if layout.dim() == 2 else layout
        if layout.dim() != 3:
            raise ValueError(f"layout of shape {tuple(layout.shape)}: expected [heads, rows, columns]")
        self.layout, self.block, self.mode = layout, block, mode
        self.trans_a, self.trans_b = trans_a, trans_b
        self._entries = layout.nonzero().T

    def __call__(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Returns the product.

        Args:
            a: Left factor: dense ``[batch, heads, n, k]``, leading dimensions may be missing; or block-sparse.
            b: Right factor, in the same form.

        Raises:
            ValueError: Devices, dtypes (outside autocast) or inner sizes differ.
        """
        if a.device != b.device:
            raise ValueError(f"{self.mode}: the factors are on {a.device} and {b.device}; expected one device")
        if a.dtype != b.dtype and not torch.is_autocast_enabled(a.device.type):
            raise ValueError(f"{self.mode}: the factors have dtypes {a.dtype} and {b.dtype}; expected one")
        heads, rows, columns = (index.to(a.device) for index in self._entries)
        if self.mode == "sdd":
            left = self._blocks(self._dense(a, self.trans_a, "left", self.layout.size(1)), 2)
            right = self._blocks(self._dense(b, self.trans_b, "right", None, self.layout.size(2)), 3)
            if left.size(-1) != right.size(-2):
                raise ValueError(f"sdd: inner sizes {left.size(-1)} and {right.size(-2)} differ")
            return left[:, heads, rows] @ right[:, heads, columns]
        sparse, is_transposed = (a, self.trans_a) if self.mode == "dsd" else (b, self.trans_b)
        if sparse.dim() != 4 or tuple(sparse.shape[1:]) != (heads.numel(), self.block, self.block):
            raise ValueError(
                f"{self.mode}: expected a block-sparse factor [batch, {heads.numel()}, {self.block}, {self.block}]; "
                f"found {tuple(sparse.shape)}"
            )
        if is_transposed:
            sparse, rows, columns = sparse.transpose(2, 3), columns, rows
        num_rows, num_columns = self.layout.shape[:0:-1] if is_transposed else self.layout.shape[1:]
        if self.mode == "dsd":
            dense = self._dense(b, self.trans_b, "right", num_columns)
            products = sparse @ self._blocks(dense, 2)[:, heads, columns]
            result = dense.new_zeros(*dense.shape[:2], num_rows, self.block, dense.size(3), dtype=products.dtype)
            result = result.index_put((_all(dense), heads, rows), products, accumulate=True)
            return self._restore(result.flatten(2, 3), b)
        dense = self._dense(a, self.trans_a, "left", None, num_rows)
        products = self._blocks(dense, 3)[:, heads, rows] @ sparse
        result = dense.new_zeros(*dense.shape[:2], num_columns, dense.size(2), self.block, dtype=products.dtype)
        result = result.index_put((_all(dense), heads, columns), products, accumulate=True)
        return self._restore(result.transpose(2, 3).flatten(3, 4), a)

    def _dense(
        self, tensor: torch.Tensor, is_transposed: bool, side: str, rows: int | None, columns: int | None = None
    ) -> torch.Tensor:
        if tensor.dim() > 4:
            raise ValueError(f"{self.mode}: the {side} factor has {tensor.dim()} dimensions; expected at most 4")
        dense = tensor.view((1,) * (4 - tensor.dim()) + tuple(tensor.shape))
        dense = dense.transpose(2, 3) if is_transposed else dense
        for size, blocks in ((dense.size(2), rows), (dense.size(3), columns)):
            if blocks is not None and size != blocks * self.block:
                raise ValueError(
                    f"{self.mode}: the {side} factor has {size} where the layout has {blocks} blocks of {self.block} = "
                    f"{blocks * self.block}"
                )
        if dense.size(1) != self.layout.size(0):
            raise ValueError(
                f"{self.mode}: the {side} factor has {dense.size(1)} heads, the layout {self.layout.size(0)}; "
                "give both the same number"
            )
        return dense

    def _blocks(self, dense: torch.Tensor, dimension: int) -> torch.Tensor:
        """Returns blocks along rows (2) or columns (3): ``[batch, heads, blocks, n, k]``."""
        if dimension == 2:
            return dense.unflatten(2, (-1, self.block))
        return dense.unflatten(3, (-1, self.block)).transpose(2, 3)

    def _restore(self, result: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Removes the leading dimensions that the dense factor did not have."""
        return result.view(result.shape[4 - like.dim() :]) if like.dim() < 4 else result


def _all(dense: torch.Tensor) -> torch.Tensor:
    return torch.arange(dense.size(0), device=dense.device).unsqueeze(1)
