"""Optimizers that exchange codes, on axes and on stages of a pipeline."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from deepspeed.engine import DeepSpeedEngine, initialize
from deepspeed.errors import DeepSpeedError
from deepspeed.sequence import mean_loss
from deepspeed.zero.tiling.describe import CUT
from tests.ecosystem.support import needs_transformers
from tests.engine.support import inputs, rank, same_on_all_ranks
from tests.harness import on_ranks, run_ranks
from tests.harness.toy_models import tower
from tests.parallel.expert.test_layer import Net, distinguished, tokens
from tests.parallel.pipe import support as pipe
from tests.parallel.sequence import llama as sequences
from tests.parallel.sequence.net import cut
from tests.parallel.tensor.support import llama, loss_of

# Everything that compresses, with tensor ranks, experts, shared sequences and islands.
#
# The first compressed update of a run is no further from one without compression than its codec loses of what travels;
# ranks that hold the same still do, and what cannot be combined is refused at ``initialize`` by name.


SGD = {"type": "SGD", "params": {"lr": 0.1}}
ADAM = {"type": "Adam", "params": {"lr": 0.01, "eps": 1e-3, "bias_correction": False, "adam_w_mode": True}}
# How codes travel, at which ZeRO stage, and how far from plain the first update may be: of its own size.
CODECS: list[tuple[str, int, dict[str, Any], dict[str, Any], float]] = [
    ("sign", 0, {"communication_compression": {"gradients": "sign", "block": 64}}, {}, 2.5),
    ("int8", 2, {"communication_compression": {"gradients": "int8"}}, {}, 0.08),
    ("int8, weights too", 3, {"communication_compression": {"gradients": "int8", "weights": "int8"}}, {}, 0.3),
    ("ZeRO++", 3, {}, {"zero_quantized_weights": True, "zero_quantized_gradients": True}, 1.0),
    (
        "LoCo",
        3,
        {},
        {"zero_quantized_gradients": True, "zeropp_loco_param": {"err_beta": 0.8, "reset_T": 2}},
        0.6,
    ),
]
FAMILY: list[tuple[str, int, dict[str, Any]]] = [
    ("OneBitAdam", 0, {"freeze_step": 1}),
    ("OneBitAdam", 1, {"freeze_step": 1}),
    ("ZeroOneAdam", 0, {"var_freeze_step": 2, "local_step_scaler": 1, "local_step_clipper": 2}),
    ("OneBitLamb", 0, {"freeze_step": 1}),
]


def _expert_net() -> nn.Module:
    model = Net((2, 2))
    distinguished(model)
    return model


def _shared_loss(engine: Any, step: int) -> torch.Tensor:
    place = rank()
    mine = cut(sequences.packed_batch(place // 2, step), place % 2, 2)
    given = {name: value for name, value in mine.items() if name != "shift_labels"}
    logits = engine(**given, use_cache=False).logits.float()
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), mine["shift_labels"].flatten(), reduction="none")
    return mean_loss(loss, mine["shift_labels"])


AXES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], Callable[[Any, int], torch.Tensor]]] = {
    "tensor": (llama, {"tensor_parallel": {"autotp_size": 2}}, lambda e, step: loss_of(e, step, rank() // 2)),
    "experts": (_expert_net, {}, lambda e, step: e(tokens(step + 1, 0, rank()))),
    "sequence": (sequences.llama, {"sequence_parallel_size": 2}, _shared_loss),
    "islands": (
        tower,
        {"communication_compression": {"islands": {"size": 2, "sync_every": 3}}},
        lambda e, step: e(inputs(step, rank())),
    ),
}


def make(axis: str, stage: int, optimizer: dict[str, Any], more: dict[str, Any], zero: dict[str, Any]) -> Any:
    model, config, _ = AXES[axis]
    at = "communication_compression"
    sharded = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    result = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        **config,
        **more,
        at: {**config.get(at, {}), **more.get(at, {})},
        "optimizer": optimizer,
        "zero_optimization": {"stage": stage, **sharded, **zero},
    }
    return initialize(model=model(), config=result)[0]


def update(axis: str, engine: Any, step: int) -> None:
    torch.manual_seed(10 * step + rank())  # gates of experts draw
    engine.backward(AXES[axis][2](engine, step))
    engine.step()


def weights(engine: DeepSpeedEngine) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in engine.iter_full("fp32")}


def norm(values: Any) -> float:
    return torch.cat([value.reshape(-1) for value in values]).norm().item()


def agree(engine: Any, axis: str, what: str) -> dict[str, torch.Tensor]:
    """Checks that what several ranks hold is the same on them; returns the weights."""
    apart = {"islands": rank() // 2, "tensor": 0, "sequence": 0, "experts": 0}[axis]
    groups = {}
    for bucket in engine._runtime.buckets:
        for tile in bucket.layout.tiles:
            groups[tile.name] = bucket.group.name
    sums, whole = {}, weights(engine)
    for name, value in whole.items():
        group = groups.get(name, "")
        part = rank() % 2 if group == CUT or "ep_size" in group else 0
        sums[name] = (part, value.double().sum().item())
    result: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(result, (apart, sums))
    for other, theirs in result:
        if other == apart:
            for name, (part, total) in theirs.items():
                assert part != sums[name][0] or total == sums[name][1], f"{what}: {name}"
    return whole


def first_update(axis: str, stage: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Returns the weights before and after the first update without compression."""
    engine = make(axis, stage, SGD, {}, {})
    before = weights(engine)
    update(axis, engine, 0)
    after = weights(engine)
    engine.destroy()
    return before, after


CELLS = [pytest.param(axis, marks=[pytest.mark.slow] if axis == "sequence" else []) for axis in AXES]


@needs_transformers
@pytest.mark.parametrize("axis", CELLS)
@on_ranks(4, timeout=240)
def test_codes_on_every_axis(axis: str) -> None:
    plain: dict[int, Any] = {}
    for name, stage, more, zero, far in CODECS:
        what = f"{axis}, {name}"
        if stage not in plain:
            plain[stage] = first_update(axis, stage)
        first, theirs = plain[stage]
        coded = make(axis, stage, SGD, more, zero)
        update(axis, coded, 0)
        ours = weights(coded)
        moved = norm(theirs[key] - first[key] for key in first)
        apart = norm(theirs[key] - ours[key] for key in first)
        assert moved > 0 and 0 < apart <= far * moved, f"{what}: {apart / moved:.3f}"
        for step in range(1, 4):
            update(axis, coded, step)
        assert all(bool(value.isfinite().all()) for value in agree(coded, axis, what).values()), what
        coded.destroy()


@needs_transformers
@pytest.mark.parametrize("axis", CELLS)
@on_ranks(4, timeout=240)
def test_the_family_on_every_axis(axis: str) -> None:
    for name, stage, more in FAMILY:
        what = f"{axis}, {name}, stage {stage}"
        section = {"type": name, "params": {"lr": 0.01, "eps": 1e-3, **more}}
        try:
            engine = make(axis, stage, section, {}, {})
        except DeepSpeedError as error:
            refused = (axis, name) in {("islands", "ZeroOneAdam"), ("tensor", "OneBitLamb")}
            assert refused and name in str(error), f"{what}: {error}"
            continue
        plain = make(axis, stage, ADAM, {}, {}) if name == "OneBitAdam" else None
        before = weights(engine)
        update(axis, engine, 0)
        if plain is not None:
            update(axis, plain, 0)
            at = weights(plain)
            assert all(torch.equal(value, at[key]) for key, value in weights(engine).items()), what
            update(axis, plain, 1)
            update(axis, engine, 1)
            theirs, ours = weights(plain), weights(engine)
            moved = norm(theirs[key] - at[key] for key in at)
            apart = norm(theirs[key] - ours[key] for key in at)
            assert 0 < apart <= 2.5 * moved, f"{what}: {apart / moved:.3f}"
            found = engine.get_global_grad_norm()
            assert found > 0 and (axis == "islands" or same_on_all_ranks(found)), what
            plain.destroy()
        first = 2 if plain is not None else 1
        for step in range(first, 6):
            update(axis, engine, step)
        if engine.optimizer is not None:
            engine.inspect().driver.synchronize()  # 0/1 Adam's ranks have taken steps of their own
        after = agree(engine, axis, what)
        assert any(not torch.equal(value, before[key]) for key, value in after.items()), what
        assert all(bool(value.isfinite().all()) for value in after.values()), what
        engine.destroy()


# 1-bit Adam on stages of a pipeline with tied weights: the same as without stages, and of one norm everywhere.


COUNT, STEPS = 2, 5
OPTIMIZER: dict[str, Any] = {
    "type": "OneBitAdam",
    "params": {"lr": 1e-2, "freeze_step": 2, "eps": 1e-3, "weight_decay": 0.1},
}


def stages(zero_stages: tuple[int, ...]) -> list[Any]:
    """Two stages by two data ranks."""
    result = []
    for zero in zero_stages:
        engine = pipe.engine_of(2, zero, COUNT, {"optimizer": OPTIMIZER})
        steps = pipe.train(engine, COUNT, STEPS)
        assert same_on_all_ranks(steps)
        result.append((steps, pipe.weights(engine)))
        tied = {name: value.tolist() for name, value in result[-1][1].items() if "embed" in name or "tied" in name}
        assert tied and same_on_all_ranks(tied)  # both ends have the same weights still
        engine.destroy()
    return result


def whole() -> tuple[list[Any], list[Any]]:
    """Two data ranks, no stages: with other buckets signs have other scales, so only the warm-up is the same."""
    engine = pipe.engine_of(1, 0, COUNT, {"optimizer": OPTIMIZER})
    return pipe.train(engine, COUNT, STEPS), []


def test_stages_of_a_pipeline() -> None:
    by_rank = run_ranks(stages, 4, (0, 1))
    expected, _ = run_ranks(whole, 2)[0]
    for steps, _ in by_rank[0]:
        for (loss, _), (other, _) in zip(steps[:3], expected[:3], strict=True):
            assert abs(loss - other) < 1e-5 * abs(other)
        for (_, norm), (_, other_norm) in zip(steps[:2], expected[:2], strict=True):
            assert abs(norm - other_norm) < 1e-4 * other_norm
        for loss, _ in steps:
            assert loss < 1.2 * expected[0][0]
    zero, one = by_rank[0]
    for name in zero[1]:  # the ZeRO stage changes nothing
        torch.testing.assert_close(zero[1][name], one[1][name], rtol=1e-5, atol=1e-6)


OTHERS: dict[str, dict[str, Any]] = {
    "OneBitLamb": {"freeze_step": 2},
    "ZeroOneAdam": {"var_freeze_step": 2, "local_step_scaler": 1, "local_step_clipper": 2},
}


@on_ranks(4)
def test_the_rest_of_the_family_on_stages() -> None:
    """The rest of the family on stages: ranks of a stage agree, both ends of a tie too, and the loss falls."""
    for name, params in OTHERS.items():
        section = {"type": name, "params": {"lr": 1e-2, "eps": 1e-3, **params}}
        engine = pipe.engine_of(2, 0, COUNT, {"optimizer": section})
        steps = pipe.train(engine, COUNT, 6)
        assert same_on_all_ranks(steps) and steps[-1][0] < steps[0][0], (name, steps)
        tied = {key: value.tolist() for key, value in pipe.weights(engine).items() if "embed" in key or "tied" in key}
        assert tied and same_on_all_ranks(tied), name
        engine.destroy()
