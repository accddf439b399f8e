"""The classic estimates: the planner's numbers under the old names, against what a real training holds."""

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.plan.memory_estimates import count_params
from deepspeed.runtime.zero import stage3, stage_1_and_2
from deepspeed.zero.placement import Tier
from deepspeed.zero.storage import StorageKind
from tests.harness import run_ranks

LAYER = 200_000
LAYERS = 4


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(LAYER // 100, 100, bias=False) for _ in range(LAYERS))

    def forward(self, x):
        return sum(layer(x).float().square().mean() for layer in self.layers)


def _held(stage, optimizer, params):
    """(host bytes, device bytes without gathered layers, most gathered bytes) between backward and update."""
    zero = {"stage": stage, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
    for key, device in (("offload_optimizer", optimizer), ("offload_param", params)):
        if device != "none":
            zero[key] = {"device": device}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": zero,
    }
    engine = deepspeed.initialize(model=Stack(), config=config)[0]
    for _ in range(2):
        engine.backward(engine(torch.ones(1, LAYER // 100, dtype=torch.bfloat16)))
        engine.optimizer.count_state()
        memory_tracker = engine._runtime.memory_tracker
        found = (
            memory_tracker.live_at(Tier.HOST),
            memory_tracker.live_at(Tier.DEVICE) - memory_tracker.live(StorageKind.GATHERED),
            memory_tracker.peak(StorageKind.GATHERED),
        )
        engine.step()
    engine.destroy()
    return found


def _all_held(cells):
    return [_held(*cell) for cell in cells]


CELLS = [(2, "none", "none"), (2, "cpu", "none"), (3, "none", "none"), (3, "cpu", "none"), (3, "cpu", "cpu")]


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_estimates_are_what_a_training_holds(ranks):
    total = LAYER * LAYERS
    for (stage, optimizer, params), (host, device, gathered) in zip(
        CELLS, run_ranks(_all_held, ranks, CELLS)[0], strict=True
    ):
        offload = optimizer == "cpu"
        options = {"num_gpus_per_node": ranks, "additional_buffer_factor": 1.0, "cpu_offload": offload}
        if stage == 2:
            found = stage_1_and_2.estimate_zero2_model_states_mem_needs(total, **options)
            expected = (max(host, 4 * total) * ranks, device)
        else:
            found = stage3.estimate_zero3_model_states_mem_needs(
                total, LAYER, cpu_offload_params=params == "cpu", zero_init=True, **options
            )
            expected = (max(host, 4 * LAYER) * ranks, device + gathered, gathered)
        assert found == pytest.approx(expected, rel=0.05), (stage, optimizer, params)


def test_the_buffer_factor_multiplies_the_host_figure():
    plain = stage_1_and_2.estimate_zero2_model_states_mem_needs(10**6, additional_buffer_factor=1.0)
    default = stage_1_and_2.estimate_zero2_model_states_mem_needs(10**6)
    assert default == (plain[0] * 3 // 2, plain[1])


def test_a_model_not_built_under_init_is_whole_on_the_host():
    built, sharded = (
        stage3.estimate_zero3_model_states_mem_needs(
            10**6, 10**5, 8, 2, cpu_offload=False, zero_init=init, additional_buffer_factor=1.0
        )
        for init in (False, True)
    )
    assert (built[0], sharded[0]) == (4 * 10**6 * 8, 4 * 10**5 * 8)
    assert built[1:] == sharded[1:]


def test_impossible_sizes_are_refused():
    with pytest.raises(DeepSpeedConfigError, match="num_gpus_per_node"):
        stage_1_and_2.estimate_zero2_model_states_mem_needs(1000, num_gpus_per_node=0)
    with pytest.raises(DeepSpeedConfigError, match="largest_layer_params"):
        stage3.estimate_zero3_model_states_mem_needs(1000, 0)


def model() -> nn.Module:
    built = nn.Sequential(nn.Linear(10, 10, bias=False), nn.Linear(10, 20), nn.Linear(10, 10, bias=False))
    built[2].weight = built[0].weight  # tied
    return built


def test_count_params():
    assert count_params(model()) == (100 + 220, 220)
    sharded = nn.Linear(1, 1, bias=False)
    sharded.weight.data = torch.empty(0)
    sharded.weight.ds_numel = 50
    assert count_params(sharded) == (50, 50)


@pytest.mark.parametrize(
    ("show", "rows"),
    [
        (stage_1_and_2.estimate_zero2_model_states_mem_needs_all_live, 2),
        (stage3.estimate_zero3_model_states_mem_needs_all_live, 6),
    ],
)
def test_tables(show, rows, capsys):
    given = model()
    show(given, num_gpus_per_node=2)
    text = capsys.readouterr().out
    assert "model states" in text and text.count("GiB") == 2 * rows
    assert given[0].weight.device.type == "cpu"
    assert given[0](torch.ones(10)).shape == (10,), "its forward is still its own"


def test_cold_tables(capsys):
    stage_1_and_2.estimate_zero2_model_states_mem_needs_all_cold(2**26)
    assert capsys.readouterr().out.count("GiB") == 4
    stage3.estimate_zero3_model_states_mem_needs_all_cold(2**26, 2**24)
    tables = capsys.readouterr().out
    assert tables.count("GiB") == 12
    stage3.estimate_zero3_model_states_mem_needs_all_cold(total_params=2.0**26, largest_layer_params=2.0**24)
    assert capsys.readouterr().out == tables
