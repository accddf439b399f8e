"""Whole sequences are evaluated by the ranks that share them in training: the same answers, and parts of the memory."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

import deepspeed
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from tests.ecosystem.support import needs_transformers
from tests.harness import on_ranks
from tests.parallel.sequence.llama import llama
from tests.parallel.sequence.test_tiled import Largest

pytestmark = needs_transformers


def _engine(size, stage, **section):
    model = llama(vocab_size=13)
    mpu = UlyssesSPAttentionHF.register_with_transformers(
        model, core_attn_implementation="sdpa", sequence_parallel_size=size, micro_batch_size=1, disable_in_eval=True
    )
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "sequence_parallel": section,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if stage else None
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config, mpu=mpu)[0]


def _batch(length, rows):
    """Padded on the left; the last ranks of the shared sequence have nothing that counts."""
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(1, 13, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, 4:] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


@pytest.mark.parametrize(
    ("ranks", "stage"),
    [
        (2, 2),
        *(pytest.param(ranks, stage, marks=pytest.mark.slow) for ranks, stage in ((2, 0), (2, 3), (4, 3))),
    ],
)
@on_ranks()
def test_evaluation_is_that_of_whole_sequences(stage) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = llama(vocab_size=13).eval()
    # Lengths that differ between the ranks and that they do not divide, and different numbers of sequences.
    mine = _batch(9 + 4 * rank, 1 + rank % 2)
    turned = dict(reversed(mine.items())) if rank else mine
    parts = [(1 + other % 2) * -(-(9 + 4 * other) // size) for other in range(size)]
    most = max(parts)
    with torch.no_grad():
        expected = whole(**mine)
        summed = whole(**mine, num_items_in_batch=5).loss
    for section in ({}, {"evaluation": "loss"}, {"evaluation": "loss", "tiled_loss": True, "tile_tokens": 2}):
        engine = _engine(size, stage, **section)
        engine.eval()
        with torch.no_grad():
            with Largest() as seen:
                found = engine(**turned)
            torch.testing.assert_close(found.loss, expected.loss)
            assert engine(**mine, num_items_in_batch=torch.tensor(5)).loss.item() == pytest.approx(summed.item())
            if section:
                assert found.logits is None and seen.rows <= (2 if "tiled_loss" in section else most)
            else:
                torch.testing.assert_close(found.logits, expected.logits)
                assert engine(**mine, return_dict=False)[1].shape == expected.logits.shape
            with Largest() as seen:
                logits = engine(input_ids=mine["input_ids"], use_cache=False).logits
            assert logits.shape == (*mine["input_ids"].shape, 13) and seen.rows == max(size * parts[rank], most)
            torch.testing.assert_close(logits, whole(mine["input_ids"]).logits)
            # What cannot be shared is computed by each rank, also where only one of them has such a batch.
            more = {"output_hidden_states": True} if rank == 0 else {}
            found = engine(**mine, **more)
            torch.testing.assert_close(found.loss, expected.loss)
            assert (found.hidden_states is not None) == (rank == 0)
            # Equally many passes on all ranks, which stage 3 needs.
            options = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
            made = [model.generate(mine["input_ids"], **options) for model in (engine.module, whole)]
            assert torch.equal(*made)
        engine.destroy()


@on_ranks(2)
def test_one_rank_evaluates() -> None:
    """Where not all ranks evaluate, the configuration states it."""
    engine = _engine(2, 0, evaluation="whole")
    engine.eval()
    if dist.get_rank() == 0:
        mine = _batch(9, 1)
        with torch.no_grad():
            torch.testing.assert_close(engine(**mine).loss, llama(vocab_size=13)(**mine).loss)
    dist.barrier()


@on_ranks(2)
def test_each_rank_may_bring_whole_sequences_with_a_mask() -> None:
    """Each rank hands in its own whole sequences, with position ids and any padding mask."""
    modes = ["ulysses", "ring"]
    rank = dist.get_rank()
    for mode in modes:
        model, whole = llama(vocab_size=13), llama(vocab_size=13).eval()
        config = {
            "train_micro_batch_size_per_gpu": 1, "sequence_parallel_size": 2, "sequence_parallel": {"mode": mode},
        }  # fmt: skip
        engine = deepspeed.initialize(model=model, config=config)[0]
        engine.eval()
        for left, right in ((0, 0), (1 + rank, 0), (0, 2 + rank)):
            ids = torch.randint(1, 13, (2, 8), generator=torch.Generator().manual_seed(rank))
            mask = torch.ones_like(ids)
            mask[0, :left], mask[1, 8 - right :] = 0, 0
            for positions in (torch.arange(8).expand(2, -1), (mask.cumsum(-1) - 1).clamp(min=0)):
                given = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "use_cache": False}
                with torch.no_grad():
                    found, expected = engine(**given).logits, whole(**given).logits
                visible = mask.bool()
                torch.testing.assert_close(found[visible], expected[visible], msg=lambda text: f"{mode}: {text}")  # noqa: B023
        engine.destroy()


@on_ranks(2)
def test_a_model_may_count_positions_by_the_padding_mask() -> None:
    """OPT numbers a sequence's tokens by its padding mask."""
    rank = dist.get_rank()
    make = partial(llama, kind="OPT", vocab_size=13, hidden_size=16, word_embed_proj_dim=16, ffn_dim=20, dropout=0.0)
    model, whole = make(), make().eval()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "sequence_parallel_size": 2,
        "sequence_parallel": {"evaluation": "logits"},
    }
    UlyssesSPAttentionHF.register_with_transformers(
        model, core_attn_implementation="sdpa", sequence_parallel_size=2, micro_batch_size=1, disable_in_eval=True
    )
    engine = deepspeed.initialize(model=model, config=config)[0]
    engine.eval()
    for rows in (_batch(9 + 4 * rank, 2), _batch(8, 1)):
        left = {**rows, "attention_mask": rows["attention_mask"].clone()}
        left["attention_mask"][0, : 3 + 2 * rank] = 0
        for given in (left, {"input_ids": rows["input_ids"]}):
            with torch.no_grad():
                found, expected = engine(**given, use_cache=False).logits, whole(**given).logits
            visible = given.get("attention_mask", torch.ones_like(rows["input_ids"])).bool()
            torch.testing.assert_close(found[visible], expected[visible])
    engine.destroy()
