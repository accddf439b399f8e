"""Which buckets nobody needs when some modules of the model are not called."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from deepspeed.zero.bucket import Bucket


class ParameterBlockMap:
    """Which blocks the parameters of each bucket belong to.

    Args:
        model: The model.
        buckets: Its buckets.
        blocks: Modules of the model that a forward may leave out.
    """

    def __init__(self, model: nn.Module, buckets: Iterable[Bucket], blocks: Sequence[nn.Module]) -> None:
        block_of = {module: number for number, block in enumerate(blocks) for module in block.modules()}
        owners: dict[nn.Parameter, set[int | None]] = {}
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                owners.setdefault(parameter, set()).add(block_of.get(module))
        self._owners = {
            bucket.index: frozenset[int | None]().union(*(owners.get(parameter, {None}) for parameter in bucket.params))
            for bucket in buckets
        }

    def only_of(self, numbers: Iterable[int]) -> frozenset[int]:
        """Returns the buckets whose parameters belong to these blocks alone."""
        left_out = frozenset[int | None](numbers)
        return frozenset(index for index, owners in self._owners.items() if owners and owners <= left_out)
