"""A checkpoint of any pipeline continues in any other: stages, copies, ZeRO stage, schedule; tied weights included."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

import deepspeed
from deepspeed.pipe import LayerSpec, PipelineModule
from tests.harness.pool import run_ranks
from tests.parallel.pipe import support

COUNT = 4


def _whole_run(stages: int, stage: int, folder: str, **given: Any) -> list[tuple[float, float]]:
    engine = support.engine_of(stages, stage, COUNT, **given)
    support.train(engine, COUNT, 2)
    engine.save_checkpoint(folder, client_state={"seen": 2})
    return support.train(engine, COUNT, 2, first=2)


def _continued(stages: int, stage: int, folder: str, **given: Any) -> list[tuple[float, float]]:
    engine = support.engine_of(stages, stage, COUNT, **given)
    path, client = engine.load_checkpoint(folder)
    assert path is not None and client["seen"] == 2 and engine.global_steps == 2
    return support.train(engine, COUNT, 2, first=2)


SHAPES = {
    "one": (1, 1, 0, {}),
    "two stages": (2, 2, 1, {}),
    "two stages, two copies, stage 3": (4, 2, 3, {"more": {"zero": {"stage3_param_persistence_threshold": 0}}}),
    "interleaved": (2, 2, 2, {"schedule": "interleaved"}),
    "V": (2, 2, 1, {"schedule": "zbv"}),
}


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [("two stages", "one"), ("two stages", "interleaved"), ("one", "V")],
)
def test_any_to_any(saved, loaded, tmp_path):
    world, stages, stage, given = SHAPES[saved]
    expected = run_ranks(_whole_run, world, stages, stage, str(tmp_path), **given)[0]
    world, stages, stage, given = SHAPES[loaded]
    found = run_ranks(_continued, world, stages, stage, str(tmp_path), **given)[0]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("other", ["two stages, two copies, stage 3"])
def test_with_copies(other, tmp_path):
    """Copies see other samples, so the run that continues is compared with one of its own shape."""
    world, stages, stage, given = SHAPES[other]
    expected = run_ranks(_whole_run, world, stages, stage, str(tmp_path), **given)[0]
    found = run_ranks(_continued, 4, 2, 1, str(tmp_path))[0]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=2e-6, atol=1e-6)


def _exported(folder: str) -> dict[str, torch.Tensor]:
    engine = support.engine_of(2, 1, COUNT)
    support.train(engine, COUNT, 1)
    engine.save_checkpoint(folder)
    return support.weights(engine)


def test_export_to_one_state_dict(tmp_path):
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    parts = run_ranks(_exported, 2, str(tmp_path))
    state = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))
    expected = {**parts[0], **parts[1]}
    assert state.keys() == expected.keys()
    assert all(
        torch.equal(torch.as_tensor(state[name]).reshape(value.shape), value) for name, value in expected.items()
    )


def _export_buffers(folder: str) -> tuple[list[str], dict[str, torch.Tensor]]:
    layers = [LayerSpec(nn.Linear, 4, 4), LayerSpec(nn.BatchNorm1d, 4)] * 2
    engine = support.engine_of(2, 0, COUNT, layers=layers)
    for name, buffer in engine.module.named_buffers():
        buffer.fill_(len(name) + dist.get_rank())
    engine.save_16bit_model(folder, "model.bin")
    engine.save_16bit_model(folder, "model.safetensors")
    exported = [name for name, _ in engine.export_weights()]
    return exported, {name: buffer.clone() for name, buffer in engine.module.named_buffers()}


def test_exports_hold_the_buffers_of_all_stages(tmp_path):
    (exported, first), (nothing, second) = run_ranks(_export_buffers, 2, str(tmp_path))
    expected = {**first, **second}
    assert {"1.running_mean", "3.running_var", "3.num_batches_tracked"} <= expected.keys() and not nothing
    for state in (torch.load(tmp_path / "model.bin"), load_file(tmp_path / "model.safetensors")):
        assert sorted(state) == sorted(exported)
        assert all(torch.equal(state[name], buffer) for name, buffer in expected.items())


GROUPS = {"0.": (0.1, 0.0), "1.": (0.02, 0.5), "2.": (0.3, 0.0), "3.": (0.1, 0.0)}
"""Learning rate and weight decay of each layer; two stages hold (.1, .02) and (.3, .1)."""


def _with_groups(stages: int, *, reversed_groups: bool, factor: float = 1.0) -> Any:
    """An engine whose param groups, one per layer, are in the order of the layers or the other way round."""
    torch.manual_seed(3)
    module = PipelineModule([LayerSpec(nn.Linear, 3, 3) for _ in GROUPS], num_stages=stages, loss_fn=nn.MSELoss())

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        by_layer = {begins: [p for n, p in module.named_parameters() if n.startswith(begins)] for begins in GROUPS}
        groups = [
            {"params": held, "lr": factor * GROUPS[begins][0], "weight_decay": factor * GROUPS[begins][1]}
            for begins, held in by_layer.items()
            if held
        ]
        return torch.optim.AdamW(groups[::-1] if reversed_groups else groups, lr=0.7)

    config = support.config(1, 2)
    del config["optimizer"]
    return deepspeed.initialize(
        model=module,
        config=config,
        optimizer=optimizer,
        lr_scheduler=lambda made: torch.optim.lr_scheduler.LambdaLR(made, lambda step: 0.5**step),
    )[0]


def _rates(engine: Any) -> dict[str, tuple[float, float, float]]:
    """Learning rate, that before the schedule, weight decay of each parameter of this rank."""
    bases = engine.lr_scheduler.base_lrs
    assert len(bases) == len(engine.basic_optimizer.param_groups)
    found = {}
    for master in engine._runtime.masters:
        for tile in master.layout.tiles:
            group = engine.basic_optimizer.param_groups[tile.param_group]
            found[tile.logical] = (group["lr"], bases[tile.param_group], group["weight_decay"])
    return found


def _save_groups(stages: int, folder: str) -> dict[str, tuple[float, float, float]]:
    # The last stage's groups go the other way, so that equal numbers have nothing in common.
    engine = _with_groups(stages, reversed_groups=dist.get_rank() > 0)
    micro_batches = [(torch.ones(2, 3), torch.zeros(2, 3))] * 2
    engine.train_batch(iter(micro_batches))
    engine.save_checkpoint(folder)
    return _rates(engine)


def _load_groups(stages: int, folder: str) -> dict[str, tuple[float, float, float]]:
    engine = _with_groups(stages, reversed_groups=True, factor=3.0)
    engine.load_checkpoint(folder)
    return _rates(engine)


@pytest.mark.parametrize("stages", [1, 2])
def test_param_groups_follow_their_parameters(stages, tmp_path):
    saved = {k: v for rates in run_ranks(_save_groups, 2, 2, str(tmp_path)) for k, v in rates.items()}
    expected = {begins: (rate / 2, rate, decay) for begins, (rate, decay) in GROUPS.items()}
    assert all(saved[name] == expected[name[:2]] for name in saved) and len(saved) == 8
    loaded = {k: v for rates in run_ranks(_load_groups, stages, stages, str(tmp_path)) for k, v in rates.items()}
    assert loaded == saved
