"""A codec that rounds to bf16, for tests of everything around codecs; and engines whose values travel so."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch

from deepspeed.comm.base.codec import Codec


class Rounding(Codec):
    """Values travel in bf16; what that loses of gradients is added to the next ones."""

    name = "bf16"

    def __init__(self, *, feeds_back: bool = True) -> None:
        self.feeds_back = feeds_back

    def nbytes(self, numel: int) -> int:
        return 2 * numel

    def encode(self, chunk: torch.Tensor, error: torch.Tensor | None, codes: torch.Tensor) -> None:
        total = chunk.float() if error is None else chunk.float() + error
        rounded = codes.view(torch.bfloat16).copy_(total)
        if error is not None:
            error.copy_(torch.where(rounded.isfinite(), total - rounded.float(), 0.0))

    def decode_add(self, codes: torch.Tensor, out: torch.Tensor) -> None:
        out.add_(codes.view(torch.bfloat16).to(out.dtype))


@contextmanager
def rounded_transfers(gather: Codec | None, reduce: Codec | None) -> Iterator[None]:
    """Engines that are made inside carry parameters and gradients so."""
    module: Any = import_module("deepspeed.engine.initialize")  # the package exports a function of that name
    original = module.create_groups

    def create(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs).coded(gather, reduce)

    module.create_groups = create
    try:
        yield
    finally:
        module.create_groups = original
