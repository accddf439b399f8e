"""Batches by tokens, and the rate that follows their sizes."""

import time
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from deepspeed.data.batching.loading import _read_lengths
from deepspeed.engine import initialize
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.runtime.data_pipeline.data_sampling.variable_batch_size_and_lr import (
    VariableBatchSizeLR,
    batch_by_seqlens,
    get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed,
    scale_lr,
)
from deepspeed.schedulers import WarmupLR
from tests.harness import run_ranks
from tests.harness.logged import logged

LENGTHS = [3, 5, 2, 9, 4, 4, 1, 7, 3, 6, 2, 5]


def test_packing_in_order():
    micro, sizes, longest = batch_by_seqlens(LENGTHS, 8, effective_batch_size=2)
    assert micro == [(0, [0, 1]), (0, [2, 4]), (1, [5, 6]), (1, [7]), (2, [8]), (2, [9, 10])]
    assert (sizes, longest) == ([4, 3, 3], [5, 7, 6])
    micro, *_ = batch_by_seqlens(LENGTHS, 8, list(range(100, 112)), sequence_picking_order="seqlen")
    assert [samples for _, samples in micro][:3] == [[106, 102, 110, 100], [108, 104], [105]]


@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=40),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(3, 6),
    st.booleans(),
    st.sampled_from(["dataloader", "random", "seqlen"]),
)
def test_properties(lengths, per_batch, least, most, equal, order):
    arguments = (lengths, 16, None, least, most, order, per_batch, equal, False, 3)
    try:
        micro, sizes, longest = batch_by_seqlens(*arguments)
    except ValueError as error:
        assert "can be made of" in str(error)
        return
    assert batch_by_seqlens(*arguments) == (micro, sizes, longest)
    packed = [place for _, samples in micro for place in samples]
    assert len(packed) == len(set(packed)) and len(micro) == per_batch * len(sizes)
    for number, (size, most_tokens) in enumerate(zip(sizes, longest, strict=True)):
        batch = [samples for of, samples in micro if of == number]
        assert len(batch) == per_batch and sum(map(len, batch)) == size
        assert all(least <= len(samples) <= most and sum(lengths[p] for p in samples) <= 16 for samples in batch)
        assert max(lengths[place] for samples in batch for place in samples) == most_tokens
        assert not equal or len({len(samples) for samples in batch}) == 1
    if per_batch == least == 1:
        assert len(packed) == len(lengths), "nothing is lost, the last sample included"


def test_what_cannot_be_packed_is_named():
    with pytest.raises(ValueError, match="no batch of 4 micro-batches of 1 to 2 sequences with at most 8 tokens"):
        batch_by_seqlens([8, 8, 99], 8, effective_batch_size=4)
    with pytest.raises(ValueError, match="expected one of dataloader, random, seqlen; found 'length'"):
        batch_by_seqlens([1], 8, sequence_picking_order="length")


def test_rates():
    assert scale_lr(8, 4, 0.1) == 0.05 and scale_lr(8, 2, 0.1, "sqrt") == 0.05 and scale_lr(8, 2, 0.1, "none") == 0.1
    with pytest.raises(ValueError, match="found 'square'"):
        scale_lr(8, 4, method="square")
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    constant = VariableBatchSizeLR(optimizer, 4, [2, 4, 8])
    seen = []
    for _ in range(5):
        seen.append(optimizer.param_groups[0]["lr"])
        constant.step()
    assert seen == [0.25, 0.5, 1.0, 0.25, 0.5] and constant.get_last_lr() == [1.0]


@pytest.mark.parametrize("kind", ["ours", "torch"])
def test_rates_over_a_schedule_and_from_a_state(kind):
    def made():
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.8)
        plain = WarmupLR(optimizer, 0.0, 0.8, 6, "linear")
        if kind == "torch":
            optimizer.param_groups[0]["lr"] = 0.8
            plain = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)  # continues from the rate it finds
        return plain, optimizer

    plain, optimizer = made()
    expected = []
    for step in range(7):
        expected.append(optimizer.param_groups[0]["lr"] * [2, 4, 8][step % 3] / 4)
        plain.step()
    plain, optimizer = made()
    scaled = VariableBatchSizeLR(plain, 4, [2, 4, 8])
    seen = []
    for step in range(7):
        if step == 4:
            state = scaled.state_dict()
            plain, optimizer = made()
            scaled = VariableBatchSizeLR(plain, 4, [2, 4, 8])
            scaled.load_state_dict(state)
        seen.append(optimizer.param_groups[0]["lr"])
        scaled.step()
    assert seen == pytest.approx(expected)


class Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(1, 4)
        self.shapes: list[tuple[int, ...]] = []

    def forward(self, x):
        self.shapes.append((*x.shape, int((x > 0).sum())))
        return self.scale(x[..., None].float()).square().mean() / 100


def _samples():
    return [torch.full((length,), number + 1) for number, length in enumerate(LENGTHS)]


def _padded(sample, length):
    return torch.nn.functional.pad(sample, (0, length - len(sample)))


def _config(folder):
    batching = {"enabled": True, "max_tokens": 12, "metrics_path": str(folder), "lr_scaling_method": "linear"}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 2},
        "data_efficiency": {"enabled": True, "data_sampling": {"dynamic_batching": batching}},
    }


def _trained(folder):
    import torch.distributed as dist

    with logged() as lines:
        samples = _samples()
        engine, *_ = initialize(model=Mean(), config=_config(folder))
        loader, scheduler, arguments = get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed(
            samples, engine, sample_padding_fn=_padded
        )
        engine.lr_scheduler = scheduler
        rates, micro_batches = [], list(loader)
        for batch in micro_batches:
            rates.append(engine.get_lr()[0])
            engine.backward(engine(batch))
            engine.step()
        _, sizes, longest = batch_by_seqlens(LENGTHS, 12, effective_batch_size=4)
        assert rates[::2] == pytest.approx([0.1 * size / 8 for size in sizes])
        own = [len(b) for b in micro_batches]
        total = torch.tensor([sum(own)])
        dist.all_reduce(total)
        assert total.item() == sum(sizes)
        assert all(batch.shape[1] == longest[number // 2] for number, batch in enumerate(micro_batches))
        assert arguments["batch_size"] == max(own)
        with pytest.raises(DeepSpeedConfigError, match="expected the lengths of 5 samples, found 12"):
            get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed(samples[:5], engine)
        local = SimpleNamespace(metrics_path=str(folder / f"disk-of-rank-{dist.get_rank()}"))
        for _ in range(2):  # measured, then read
            assert _read_lengths(samples, local, None) == LENGTHS
    assert bool(lines) == (dist.get_rank() == 0)
    assert not any("row(s)" in line for line in lines), "micro-batches of other sizes are no mistake here"
    same = [torch.full((4,), number) for number in range(16)]
    engine, _, loader, scheduler = initialize(model=Mean(), training_data=same, config=_config(folder / "same"))
    assert isinstance(scheduler, VariableBatchSizeLR) and [batch.shape for batch in loader] == [(3, 4)] * 2
    return rates


def test_training_with_batches_by_tokens(tmp_path):
    first, second = run_ranks(_trained, 2, tmp_path)
    assert first == second and len(first) == 2


def test_many_samples_are_packed_in_equal_micro_batches_quickly():
    lengths = [10 + 37 * place % 90 for place in range(20_000)]
    start = time.process_time()
    micro, _, _ = batch_by_seqlens(lengths, 400, effective_batch_size=4, required_microbatches_of_same_size=True)
    assert time.process_time() - start < 5
    assert sum(len(samples) for _, samples in micro) > 19_000
