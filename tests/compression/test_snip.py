"""Pruning by SNIP with momentum: schedule, blocks and choice against loops in plain torch, at every stage."""

from typing import Any

import pytest
import torch
from torch import nn

from deepspeed.compression import compression_state, init_compression, redundancy_clean
from deepspeed.compression.feature import compression_scheduler
from deepspeed.compression.snip import SnipPlan
from deepspeed.config import parse
from deepspeed.errors import CallOrderError, DeepSpeedConfigError
from tests.engine.support import adamw
from tests.harness import run_ranks
from tests.harness.cases import Cell, train_and_resume
from tests.harness.toy_models import tiny_gpt

pytest.importorskip("transformers")

STEPS, SAVED = 7, 3
SHARED = {
    "enabled": True,
    "method": "snip_momentum",
    "block_pattern": "4x1",
    "dense_ratio": 0.3,
    "schedule_offset": 2,
    "schedule_offset_stride": 2,
    "schedule_offset_end": 6,
    "excluded_modules": ["lm_head", "1.attn"],
}


def section(**more: Any) -> dict[str, Any]:
    technique = {"shared_parameters": SHARED | more, "different_groups": {}}
    return {"compression_training": {"sparse_pruning": technique}}


def test_density_falls_by_one_factor() -> None:
    plan = SnipPlan((4, 1), 0.125, offset=2, stride=2, end=7)
    found = {step: plan.share_after(step) for step in range(10) if plan.share_after(step) is not None}
    assert found == pytest.approx({2: 0.5, 4: 0.25, 6: 0.125})
    assert [plan.is_over(step) for step in (5, 6)] == [False, True]
    at_once = SnipPlan((1, 1), 0.1, offset=3, stride=1, end=3)
    assert [at_once.share_after(step) for step in (2, 3, 4)] == [None, 0.1, None]
    assert plan.fits(8, 3) and not plan.fits(6, 3)


def tokens(step: int, micro: int, of_rank: int) -> torch.Tensor:
    return torch.randint(20, (2, 9), generator=torch.Generator().manual_seed(100 * step + 10 * micro + of_rank))


def loss_of(model: nn.Module, step: int, micro: int, of_rank: int) -> torch.Tensor:
    batch = tokens(step, micro, of_rank)
    return model(input_ids=batch, labels=batch).loss


# -- plain torch, with loops -----------------------------------------------------------------------------------------


def is_pruned(name: str) -> bool:
    return name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")) and "1.attn" not in name


def blocks(matrix: torch.Tensor) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """Of ``[out, in]``: places of the weights of every block of four outputs."""
    rows, columns = matrix.shape
    return {(r, c): [(4 * r + k, c) for k in range(4)] for r in range(rows // 4) for c in range(columns)}


def plain(accumulation: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The first rank's losses of the last micro-batch, and the masks, ``[out, in]``."""
    model = tiny_gpt()
    optimizer = adamw(model)
    pruned = {name: p for name, p in model.named_parameters() if is_pruned(name)}
    ones = {name: torch.ones_like(p) for name, p in pruned.items()}
    scores = {(n, block): 0.0 for n, p in pruned.items() for block in blocks(p.t())}
    gone: set[Any] = set()
    losses = []
    for step in range(STEPS):
        for micro in range(accumulation):
            weights = {name: p * ones[name] if name in ones else p for name, p in model.named_parameters()}
            parts = []
            for each in range(2):
                batch = tokens(step, micro, each)
                out = torch.func.functional_call(model, weights, kwargs={"input_ids": batch, "labels": batch})
                parts.append(out.loss)
            (sum(parts) / 2 / accumulation).backward()
            losses.append(parts[0].item())
        for name, p in pruned.items():
            size = (p.detach() * p.grad).abs().t()
            for block, places in blocks(size).items():
                mean = sum(size[place].item() for place in places) / 4
                scores[name, block] = 0.9 * scores[name, block] + mean
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 in (2, 4, 6):
            count = -int(-(0.3 ** ((step + 1) / 2 / 3)) * len(scores) // 1)
            keep: set[Any] = set()
            for name, p in pruned.items():  # every layer keeps two in a hundred
                own = [key for key in scores if key[0] == name and key not in gone]
                keep |= set(sorted(own, key=scores.__getitem__)[-max(1, -int(-0.02 * p.numel() / 4 // 1)) :])
            rest = [key for key in scores if key not in gone and key not in keep]
            keep |= set(sorted(rest, key=scores.__getitem__)[len(rest) - (count - len(keep)) :])
            gone = scores.keys() - keep
            for name, block in gone:
                for place in blocks(pruned[name].t())[block]:
                    ones[name].t()[place] = 0
    return losses, {name.removesuffix(".weight"): mask.t().bool() for name, mask in ones.items()}


# -- the engine ------------------------------------------------------------------------------------------------------


CELLS = [Cell(0), Cell(3), Cell(3, "fp16", 2, offload=True), Cell(1, "fp32", 2)]


def masks_of(engine: Any) -> dict[str, torch.Tensor]:
    named = engine.module.named_modules()
    return {name: m.sparse_pruning_mask.clone() for name, m in named if hasattr(m, "sparse_pruning_mask")}


def run(folder: Any) -> dict[Cell, tuple[list[float], dict[str, torch.Tensor]]]:
    found = {}
    for number, cell in enumerate(CELLS):
        masks: dict[str, torch.Tensor] = {}

        def look(engine: Any, masks: Any = masks) -> Any:
            masks.update(masks_of(engine))
            return dict(masks)

        losses = train_and_resume(
            lambda cell=cell: cell.engine(init_compression(tiny_gpt(), section()), **section()),
            loss_of,
            folder / str(number),
            steps=STEPS,
            saved=SAVED,
            look=look,
        )
        found[cell] = losses, masks
    return found


def test_every_stage_prunes_as_plain_torch_and_resumes(tmp_path: Any) -> None:
    of_ranks = run_ranks(run, 2, tmp_path, timeout=240)
    expected = {accumulation: plain(accumulation) for accumulation in (1, 2)}
    for cell, (losses, masks) in of_ranks[0].items():
        reference, kept = expected[cell.accumulation]
        assert masks.keys() == kept.keys() and len(masks) == 6
        total = sum(int(mask.sum()) for mask in masks.values()), sum(mask.numel() for mask in masks.values())
        assert 0 <= total[0] / total[1] - 0.3 < 0.01
        assert len({round(float(mask.float().mean()), 3) for mask in masks.values()}) > 1, "layers are compared"
        for name, mask in masks.items():
            assert torch.equal(mask, of_ranks[1][cell][1][name])
            differs = (mask != kept[name]).float().mean()
            assert differs <= (0.0 if cell.precision == "fp32" else 0.02), (cell, name)
        assert losses == pytest.approx(reference, rel=1e-4 if cell.precision == "fp32" else 1e-2), cell


# -- without an engine, and bad input --------------------------------------------------------------------------------


def loop(model: nn.Module, scheduler: Any, steps: int) -> None:
    optimizer = adamw(model)
    for step in range(steps):
        loss_of(model, step, 0, 0).backward()
        scheduler.before_update()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()


def test_a_loop_of_ones_own_and_cleaning() -> None:
    model = init_compression(tiny_gpt(), section())
    scheduler = compression_scheduler(model)
    loop(model, scheduler, 5)
    state = {layer.name: layer.kept for layer in compression_state(model)}
    kept = [shares["sparse"] for shares in state.values()]
    assert len(kept) == 6 and 0.3 < sum(kept) / 6 < 0.6
    batch = tokens(9, 0, 0)
    model.eval()
    before = model(batch).logits
    keys = set(tiny_gpt().state_dict())
    small = redundancy_clean(model, section())
    torch.testing.assert_close(small(batch).logits, before)
    assert set(small.state_dict()) == keys
    assert (small.transformer.h[0].mlp.c_fc.weight == 0).float().mean() > 0.3


def test_tied_weights_have_one_mask() -> None:
    model = init_compression(tiny_gpt(), section(excluded_modules=["attn", "mlp"]))
    loop(model, compression_scheduler(model), 6)
    head, embedding = model.lm_head, model.transformer.wte
    assert head.weight is embedding.weight
    assert torch.equal(head.sparse_pruning_mask, embedding.sparse_pruning_mask)
    assert head.sparse_pruning_mask.float().mean() == pytest.approx(0.3, abs=0.01)


def test_what_does_not_fit_is_refused() -> None:
    scheduler = compression_scheduler(init_compression(tiny_gpt(), section()))
    with pytest.raises(CallOrderError, match="before_update"):
        scheduler.step()
    with pytest.raises(DeepSpeedConfigError, match="lm_head, 20 x 12, cannot be divided into blocks of 8x1; set"):
        init_compression(tiny_gpt(), section(block_pattern="8x1", excluded_modules=["attn", "mlp"]))
    with pytest.raises(DeepSpeedConfigError, match="excludes all layers of the group 'all'"):
        init_compression(tiny_gpt(), section(excluded_modules=["*"]))
    frozen = tiny_gpt()
    frozen.transformer.h[0].requires_grad_(False)
    with pytest.raises(DeepSpeedConfigError, match=r"h\.0\.\S+ is frozen"):
        init_compression(frozen, section())


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"block_pattern": "channelx1"}, "expected ROWSxCOLUMNS"),
        ({"schedule_offset": 0}, "scores are computed from updates"),
        ({"schedule_offset": 9}, "6 is before schedule_offset 9"),
    ],
)
def test_settings_that_contradict_each_other(more: dict[str, Any], message: str) -> None:
    with pytest.raises(DeepSpeedConfigError, match=message):
        parse({"train_batch_size": 1, **section(**more)})


def test_settings_of_another_method_are_named() -> None:
    group = {"only": {"params": {"dense_ratio": 0.5}, "modules": ["*"]}}
    technique = {"shared_parameters": {"enabled": True, "block_pattern": "4x1"}, "different_groups": group}
    config = {"train_batch_size": 1, "compression_training": {"sparse_pruning": technique}}
    assert any("block_pattern act with the method snip_momentum alone" in line for line in parse(config).notices)
    technique["shared_parameters"] = SHARED
    with pytest.raises(DeepSpeedConfigError, match="one shared_parameters.dense_ratio"):
        parse(config)
