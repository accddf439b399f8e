"""``sparse_gradients``: rows of embeddings travel instead of whole gradients, and nothing else changes."""

import itertools

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.comm.base.counters import traffic
from deepspeed.comm.base.zero_rows import ZeroRows, row_starts
from deepspeed.comm.codecs.rows import by_rows
from deepspeed.comm.job.job import Job
from deepspeed.comm.transports.transport import Reduction, transfer_key
from deepspeed.errors import DeepSpeedConfigError, NotYetSupportedError
from tests.engine.support import rank
from tests.harness import on_ranks, run_ranks

SHAPES = ((7, 3), (5, 4))


def _reductions():
    """Rows that slices cut, ranks without any row, a buffer of zeros, and one that is full."""
    transport = Job.adopt().axis_of().transport("outside engines")
    numel, count = 48, itertools.count()
    starts = row_starts([0, 24], SHAPES, numel)
    for filled, to_owner in ((f, t) for f in ("some", "none", "all") for t in (True, False)):
        rows = ZeroRows(starts, numel, transport.size, torch.device("cpu"))
        flat = torch.zeros(numel)
        generator = torch.Generator().manual_seed(transport.rank)
        if filled == "all":
            flat[:21], flat[24:44] = torch.randn(21, generator=generator), torch.randn(20, generator=generator)
        elif filled == "some" and transport.rank != 1:
            flat[3 * transport.rank + 3 : 3 * transport.rank + 6] = torch.randn(3, generator=generator)
            flat[24 + 16 : 24 + 20] = torch.randn(4, generator=generator)
        results = []
        for one in (transport, by_rows(transport)):
            out = torch.full((numel // transport.size if to_owner else numel,), 9.0)
            key = transfer_key(transport.owner, len(results), 1, next(count))
            how = Reduction(0.5, key, "a test", 1 << 20, visit=lambda part: None, rows=rows)
            reduce = one.reduce_scatter if to_owner else one.all_reduce
            work = reduce(flat.clone(), out, how)
            work.wait()
            work.wait()
            results.append(out)
        assert torch.equal(*results), (filled, to_owner)


@pytest.mark.parametrize("size", [2, 3])
def test_sums_are_those_of_whole_buffers(size):
    run_ranks(_reductions, size)


class Words(nn.Module):
    """Two tables, of which one is looked up with a sparse gradient; some rows are never named."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.bag = nn.Embedding(400, 6, padding_idx=3, sparse=True), nn.EmbeddingBag(300, 6)
        self.head = nn.Linear(6, 5)

    def forward(self, ids):
        return self.head(self.words(ids).mean(1) + self.bag(ids % 300)).square().mean()


def _trained(stage, is_sparse, steps=2):
    settings = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "gradient_clipping": 0.1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}, "sparse_gradients": is_sparse,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }  # fmt: skip
    engine = deepspeed.initialize(model=Words(), config=settings)[0]
    dice = torch.Generator().manual_seed(rank())
    before = sum(count.nbytes for (_, axis), count in traffic.ran_along.items() if axis == "data")
    for _ in range(2 * steps):
        engine.backward(engine(torch.randint(0, 400, (2, 4), generator=dice)))
        engine.step()
    sent = sum(count.nbytes for (_, axis), count in traffic.ran_along.items() if axis == "data") - before
    state = {name: value.clone() for name, value in engine.iter_full("fp32")}
    norm = engine.get_global_grad_norm()
    engine.destroy()
    return state, norm, sent


@on_ranks(2)
def test_training_is_that_of_whole_gradients() -> None:
    stages = (0, 1, 2, 3)
    for stage in stages:
        whole, norm, all_bytes = _trained(stage, False)
        rows, found, some_bytes = _trained(stage, True)
        assert stage == 3 or some_bytes < 0.7 * all_bytes, (stage, some_bytes, all_bytes)
        assert found == pytest.approx(norm, rel=1e-6)
        for name, value in whole.items():
            assert torch.equal(rows[name], value), (stage, name)


@on_ranks(1)
def test_refused_with_momentum_and_with_norms_of_tensors() -> None:
    settings = {"train_micro_batch_size_per_gpu": 1, "sparse_gradients": True, "optimizer": {"type": "OneBitAdam"}}
    with pytest.raises(DeepSpeedConfigError, match="sparse_gradients: .* exchanges momentum in the place of gradients"):
        deepspeed.initialize(model=Words(), config=settings)
    settings |= {"optimizer": {"type": "Lamb"}, "zero_optimization": {"stage": 1}}
    with pytest.raises(NotYetSupportedError, match="FusedLamb .* or set sparse_gradients to false"):
        deepspeed.initialize(model=Words(), config=settings)
