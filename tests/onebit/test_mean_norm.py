"""The norm of a mean gradient that no rank has."""

import torch

from deepspeed.comm.transports.transport import LocalTransport
from deepspeed.zero.group import BucketGroup
from deepspeed.zero.onebit.momentum import BINS, Sketch, sketches


def gradients(numel: int, ranks: int) -> list[torch.Tensor]:
    """A common part with as much noise of each rank's own, sizes of elements as different as in a model."""
    dice = torch.Generator().manual_seed(numel)
    sizes = torch.rand(numel, generator=dice) ** 4
    common = torch.randn(numel, generator=dice)
    return [(common + torch.randn(numel, generator=dice)) * sizes for _ in range(ranks)]


def test_sums_of_random_signs_give_the_norm_of_the_mean() -> None:
    ranks = 8
    for numel in (64, BINS - 64, 300_032):
        own = gradients(numel, ranks)
        norm = torch.stack(own).mean(0).norm().item()
        found = []
        for seed in range(12):
            sums = torch.zeros(BINS)
            for one in own:
                sketch = Sketch(BucketGroup.over(LocalTransport()), seed)
                sketch.add(numel, one, 1.0 / ranks)
                sums += sketch._sums
            found.append(sums.norm().item())
        worst = max(abs(one / norm - 1) for one in found)
        assert worst < (0.1 if numel > BINS else 1e-5)
        # The ranks' own norms would not do.
        assert numel < 1000 or own[0].norm().item() > 1.3 * norm


def test_buckets_of_a_group_are_one_gradient() -> None:
    group = BucketGroup.over(LocalTransport())
    first, second = gradients(640, 1)[0], gradients(128, 1)[0]
    entries = [(group, 640, first, 2.0), (group, 64, None, 1.0), (group, 128, second, 1.0)]
    (sketch,) = sketches(entries, 7)
    expected = (2.0 * first).square().sum() + second.square().sum()
    torch.testing.assert_close(torch.tensor(sketch.squares()), expected, rtol=1e-5, atol=0)
