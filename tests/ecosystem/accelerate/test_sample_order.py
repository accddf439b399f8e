"""Accelerate's stateful loader resumes in order: the samples of each update are those of an uninterrupted run."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from tests.ecosystem.support import needs_transformers, on_cpu_ranks
from tests.harness import run_ranks

pytestmark = needs_transformers

STEPS, EACH, SAMPLES = 12, 8, 40  # updates, samples in each, samples of a pass: five updates


class Stream(IterableDataset):
    def __iter__(self):
        return (torch.tensor([float(at)]) for at in range(SAMPLES))


@on_cpu_ranks
def _part(kind, start, stop, accumulation, folder):
    """Samples of each update over all ranks, and warnings of this rank."""
    from accelerate import Accelerator, DataLoaderConfiguration
    from accelerate.utils import DeepSpeedPlugin, DummyOptim, set_seed

    seedable, workers, is_stream = kind == "seedable", 2 * (kind == "workers"), kind == "stream"
    ranks = dist.get_world_size()
    size = EACH // ranks // accumulation
    set_seed(5)
    config = {
        "train_micro_batch_size_per_gpu": size, "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "zero_optimization": {"stage": 1},
    }  # fmt: skip
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config),
        dataloader_config=DataLoaderConfiguration(
            use_stateful_dataloader=True, use_seedable_sampler=seedable, dispatch_batches=False
        ),
    )
    model = nn.Linear(1, 1)
    data = Stream() if is_stream else torch.arange(float(SAMPLES)).reshape(SAMPLES, 1)
    loader = DataLoader(data, batch_size=size, shuffle=None if is_stream else True, num_workers=workers)
    engine, _, batches = accelerator.prepare(model, DummyOptim(model.parameters()), loader)
    assert accelerator.num_processes == ranks
    if start:
        accelerator.load_state(folder)
    found: list[list[int]] = []
    while len(found) < (stop - start) * accumulation:
        for batch in batches:
            with accelerator.accumulate(engine):
                accelerator.backward(engine(batch).square().mean())
            found.append(batch.flatten().int().tolist())
            if len(found) == (stop - start) * accumulation:
                accelerator.save_state(folder)
                break
    every: list[list[list[int]]] = [[]] * ranks
    dist.all_gather_object(every, found)
    rows = [sum(parts, []) for parts in zip(*every, strict=True)]
    return [sorted(sum(rows[at : at + accumulation], [])) for at in range(0, len(rows), accumulation)]


def _in_parts(kind, parts, folder):
    found: list[list[int]] = []
    for ranks, stop, accumulation in parts:
        found += run_ranks(_part, ranks, kind, len(found), stop, accumulation, folder)[0]
    return found


SAME = [(2, 3, 1), (2, 5, 1), (2, 8, 1), (2, STEPS, 1)]
OTHER = [(2, 2, 2), (2, 4, 1), (1, 7, 1), (1, 8, 2)]


@pytest.mark.parametrize("kind", ["seedable", "generator", "workers", "stream"])
def test_samples_after_resumes_are_those_of_an_uninterrupted_run(kind, tmp_path):
    """Again and again, in later passes, with another accumulation, and on another number of ranks."""
    pytest.importorskip("torchdata")
    whole = _in_parts(kind, [(2, STEPS, 1)], str(tmp_path / "whole"))
    assert all(sorted(sum(whole[at : at + 5], [])) == list(range(SAMPLES)) for at in (0, 5))
    assert (whole[:5] == whole[5:10]) == (kind == "stream")
    assert _in_parts(kind, SAME, str(tmp_path / "same")) == whole
    # The generator of one rank continues on one rank, and so does that of a seed on any number.
    end = [(2, STEPS, 1)] if kind in ("seedable", "stream") else [(1, STEPS, 1)]
    assert _in_parts(kind, OTHER + end, str(tmp_path / "other")) == whole


def test_one_rank_resumes_in_the_order_that_it_has_drawn(tmp_path):
    pytest.importorskip("torchdata")
    whole = _in_parts("generator", [(1, 5, 1)], str(tmp_path / "whole"))
    assert _in_parts("generator", [(1, 2, 1), (1, 3, 2), (1, 5, 1)], str(tmp_path / "parts")) == whole
