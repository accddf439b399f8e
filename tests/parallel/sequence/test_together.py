"""Shared sequences together with everything else that shards: the training is that of plain torch."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

import deepspeed
from deepspeed.sequence import mean_loss
from tests.ecosystem.support import needs_transformers
from tests.engine.support import SHARDED
from tests.harness import on_ranks, run_ranks
from tests.parallel.sequence.llama import llama, packed_batch, padded_batch
from tests.parallel.sequence.net import cut

pytestmark = needs_transformers

OPTIMIZER = {"type": "AdamW", "params": {"lr": 0.01, "eps": 1e-4, "weight_decay": 0.1}}
OFFLOADED = {"offload_optimizer": {"device": "cpu"}}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "kind": "Mixtral", "sliding_window": None}


def _whole_batch(step: int, sample: int) -> dict[str, torch.Tensor]:
    return packed_batch(sample, step) if step % 2 == 0 else padded_batch(sample + 10 * step, left=True)


def _loss(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    given = {name: value for name, value in inputs.items() if name != "shift_labels"}
    logits = model(**given, use_cache=False).logits.float()
    return functional.cross_entropy(logits.flatten(0, 1), inputs["shift_labels"].flatten(), reduction="none")


def _plain(model: Any, data: int, steps: int) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4, weight_decay=0.1)
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        for sample in range(data):
            whole = _whole_batch(step, sample)
            (_loss(model, whole).sum() / (whole["shift_labels"] != -100).sum() / data).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
    return norms


def _config(size: int, stage: int, **more: Any) -> dict[str, Any]:
    zero = {"stage": stage, **(SHARDED if stage == 3 else {}), **more.pop("zero", {})}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.5,
        "sequence_parallel_size": size,
        "optimizer": OPTIMIZER,
        "zero_optimization": zero,
        **more,
    }


def _mean(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """This rank's mean: from the logits, or the model's own where it makes none."""
    if model.config.get("sequence_parallel", {}).get("tiled_loss"):
        found = model(**inputs, labels=inputs["shift_labels"], use_cache=False)
        assert found.logits is None
        return found.loss  # type: ignore[no-any-return]
    return _loss(model, inputs)


def _step(engine: Any, step: int, size: int, tensor: int = 1) -> float:
    place = dist.get_rank() // tensor
    mine = cut(_whole_batch(step, place // size), place % size, size)
    loss = mean_loss(_mean(engine, mine), mine["shift_labels"]) if size > 1 else None
    if loss is None:
        loss = _loss(engine, mine).sum() / (mine["shift_labels"] != -100).sum()
    engine.backward(loss)
    engine.step()
    return engine.get_global_grad_norm()


HALF = {"fp16": {"enabled": True, "initial_scale_power": 8}, "near": 2e-2}
CELLS = [
    ("all on the host", 2, 1, {"stage": 3, "zero": {"offload_param": {"device": "cpu"}, **OFFLOADED}}),
    (
        "round the ring, all on the host",
        2,
        1,
        {
            "stage": 3,
            "zero": {"offload_param": {"device": "cpu"}, **OFFLOADED},
            "sequence_parallel": {"mode": "ring"},
        },
    ),
    ("optimizer on the host, fp16", 2, 1, {"stage": 2, "zero": OFFLOADED, **HALF}),
    ("bf16 and recomputation", 2, 1, {"stage": 3, "bf16": {"enabled": True}, "near": 3e-2, "recomputed": True}),
]
TILED = {"tiled_mlp": True, "tiled_loss": True, "tile_tokens": 3}
CUT = {"tensor_parallel": {"autotp_size": 2}}
MORE_CELLS = [
    ("tensor", 2, 2, {"stage": 1, **CUT}),
    ("experts", 2, 1, {"stage": 2, "model": EXPERTS, "expert_parallel": {"enabled": True, "autoep_size": 2}}),
    ("tensor, recomputation", 2, 2, {"stage": 3, "recomputed": True, **CUT}),
    ("tensor, tiles", 2, 2, {"stage": 2, **CUT, "sequence_parallel": TILED}),
    ("data, optimizer on the host", 2, 1, {"stage": 1, "zero": OFFLOADED}),
    (
        "experts at stage 3",
        2,
        1,
        {"stage": 3, "model": EXPERTS, "expert_parallel": {"enabled": True, "autoep_size": 2}},
    ),
]


@pytest.mark.parametrize(
    ("ranks", "cells"),
    [
        pytest.param(2, CELLS, id="two ranks"),
        pytest.param(4, MORE_CELLS[:2], id="tensor and expert ranks"),
        *(pytest.param(4, [cell], id=cell[0], marks=pytest.mark.slow) for cell in MORE_CELLS[2:]),
    ],
)
@on_ranks()
def test_with_what_else_shards(cells: list[tuple[str, int, int, dict[str, Any]]]) -> None:
    """Three steps; parameters, and the norm before clipping, are those of plain torch."""
    for name, size, tensor, given in cells:
        more = {**given, "zero": dict(given.get("zero", {}))}
        stage, near = more.pop("stage"), more.pop("near", 1e-5)
        kind = more.pop("model", {})
        data = dist.get_world_size() // size // tensor
        expected, model = llama(**kind), llama(**kind)
        wanted = _plain(expected, data, 3)
        if more.pop("recomputed", False):
            model.gradient_checkpointing_enable({"use_reentrant": False})
        engine = deepspeed.initialize(model=model, config=_config(size, stage, **more))[0]
        assert (engine.sequence_parallel_size, engine.dp_world_size) == (size, data)
        norms = [_step(engine, step, size, tensor) for step in range(3)]
        assert norms == pytest.approx(wanted, rel=max(near, 1e-4)), name
        full = dict(engine.iter_full("fp32"))
        for key, parameter in expected.named_parameters():
            if full[key].shape != parameter.shape:  # this rank's experts: they are spread over data ranks
                parameter = parameter.chunk(data)[dist.get_rank() // size]
            difference = (full[key] - parameter).norm() / parameter.norm()
            assert difference < near, (name, key, difference.item())
        engine.destroy()
        deepspeed.utils.groups.set_mesh(None)


def _full(engine: Any) -> dict[str, dict[str, torch.Tensor]]:
    return {kind: dict(engine.iter_full(kind)) for kind in ("fp32", "exp_avg", "exp_avg_sq")}


def _saves(folder: str, size: int, stage: int) -> Any:
    engine = deepspeed.initialize(model=llama(), config=_config(size, stage))[0]
    for step in range(2):
        _step(engine, step, size)
    engine.save_checkpoint(folder, tag=f"sp{size}")
    return _full(engine)


def _loads(folder: str, tag: str, size: int, stage: int) -> Any:
    engine = deepspeed.initialize(model=llama(), config=_config(size, stage))[0]
    path, _ = engine.load_checkpoint(folder, tag=tag)
    assert path is not None and engine.global_steps == 2
    found = _full(engine)
    _step(engine, 2, size)
    return found, dict(engine.iter_full("fp32"))


def test_checkpoints_do_not_depend_on_sequence_ranks(tmp_path):
    """Made by one number of sequence ranks, read by another, by none, at another stage and on other ranks."""
    expected = llama()
    _plain(expected, 1, 3)
    made = {size: run_ranks(_saves, ranks, str(tmp_path), size, stage) for ranks, size, stage in ((2, 2, 2), (1, 1, 1))}
    for tag, ranks, size, stage in ((2, 1, 1, 0), (2, 4, 4, 3), (1, 2, 2, 3)):
        for found, after in run_ranks(_loads, ranks, str(tmp_path), f"sp{tag}", size, stage):
            for kind, tensors in made[tag][0].items():
                for name, tensor in tensors.items():
                    assert torch.equal(found[kind][name], tensor), (tag, size, kind, name)
            for name, parameter in expected.named_parameters():
                torch.testing.assert_close(after[name], parameter.detach(), rtol=1e-5, atol=1e-6)
