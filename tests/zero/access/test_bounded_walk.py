"""``iter_full`` keeps no values back: what is read of a bucket is yielded before the next one is read."""

from torch import nn

from deepspeed.zero.access import whole_buckets
from tests.engine.support import engine_of
from tests.harness import run_ranks


class _Adapted(nn.Module):
    """A frozen and a trainable layer, as low-rank adapters have: their buckets lie apart."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.trained = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.frozen.weight.requires_grad_(False)

    def forward(self, x):
        return self.trained(self.frozen(x))


def _read_ahead() -> list[int]:
    """Values that had been read and not yielded, at each value of a walk."""
    engine = engine_of(nn.Sequential(*(_Adapted() for _ in range(4))), 3, zero={})
    read: list[str] = []
    walk = whole_buckets._walk

    def counted(*arguments):
        for tile, value in walk(*arguments):
            read.append(tile.name)
            yield tile, value

    whole_buckets._walk = counted
    try:
        kept, yielded = [], 0
        for _ in engine.iter_full("param", bucket_bytes=64):
            yielded += 1
            kept.append(len(read) - yielded)
    finally:
        whole_buckets._walk = walk
    assert yielded == 8
    return kept


def test_nothing_read_is_kept_back():
    (kept,) = run_ranks(_read_ahead, 1)
    assert max(kept) == 0, kept
