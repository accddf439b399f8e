"""The rule-of-thumb estimates, against the formulas of the reference and hand-computed numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from deepspeed.plan.memory_estimates import count_params
from deepspeed.runtime.zero import stage3, stage_1_and_2


@pytest.mark.parametrize(
    ("options", "host", "device"),
    [
        ({"cpu_offload": True}, 1000 * 16 * 1.5, 2000),
        ({"cpu_offload": True, "num_gpus_per_node": 8, "num_nodes": 2}, 1000 * 64 * 1.5, 2000),
        ({"cpu_offload": False}, 4000 * 1.5, 20000),
        ({"cpu_offload": False, "num_gpus_per_node": 2, "num_nodes": 2}, 8000 * 1.5, 2000 + 4500),
        ({"cpu_offload": False, "additional_buffer_factor": 2.0}, 8000, 20000),
    ],
)
def test_zero2(options, host, device):
    assert stage_1_and_2.estimate_zero2_model_states_mem_needs(1000, **options) == (host, device)


OFFLOADED = {"cpu_offload": True, "cpu_offload_params": True}
OPTIMIZER = {"cpu_offload": True, "cpu_offload_params": False}
NOTHING = {"cpu_offload": False, "cpu_offload_params": False}
MANY = {"num_gpus_per_node": 8, "num_nodes": 2}


@pytest.mark.parametrize(
    ("options", "host", "device"),
    [
        ({**OFFLOADED, "zero_init": True}, 18000 * 1.5, 400),
        ({**OFFLOADED, "zero_init": True, **MANY}, 9000 * 1.5, 400),
        ({**OFFLOADED, "zero_init": False, **MANY}, 1000 * 32 * 1.5, 400),
        ({**OPTIMIZER, "zero_init": True}, 16000 * 1.5, 400 + 2000),
        ({**OPTIMIZER, "zero_init": False, **MANY}, 32000 * 1.5, 400 + 125),
        ({**NOTHING, "zero_init": True, **MANY}, 100 * 4 * 8 * 1.5, 400 + 1125),
        ({**NOTHING, "zero_init": False, **MANY}, 1000 * 4 * 8 * 1.5, 400 + 1125),
    ],
)
def test_zero3(options, host, device):
    assert stage3.estimate_zero3_model_states_mem_needs(1000, 100, **options) == (host, device, 400)


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
    show(model(), num_gpus_per_node=2)
    text = capsys.readouterr().out
    assert "model states" in text and text.count("GiB") == 2 * rows


def test_cold_tables(capsys):
    stage_1_and_2.estimate_zero2_model_states_mem_needs_all_cold(2**30)
    text = capsys.readouterr().out
    assert "24.00 GiB" in text and "2.00 GiB" in text and "20.00 GiB" in text
    stage3.estimate_zero3_model_states_mem_needs_all_cold(2**30, 2**20)
    assert "27.00 GiB" in capsys.readouterr().out
