"""Numbers of purely data-parallel plans, as they were before the planner knew other axes; RMSNorm is one kernel."""

import pytest

import deepspeed
from tests.plan.cells import SHAPE

# stage, further keys, bytes of a device, of a host, of activations, and by collective (calls, bytes, inside a node,
# between nodes)
NUMBERS = [
    (0, {}, 18986292, 0, 2696784, {"all_reduce": (4, 6963200, 5222400, 870400)}),
    (
        1,
        {"offload_optimizer": {"device": "cpu"}},
        8445524,
        7487488,
        2696784,
        {"all_gather": (4, 1740800, 1305600, 217600), "reduce_scatter": (4, 3481600, 2611200, 435200)},
    ),
    (
        1,
        {},
        9751124,
        0,
        2696784,
        {"all_gather": (4, 1740800, 1305600, 217600), "reduce_scatter": (4, 3481600, 2611200, 435200)},
    ),
    (
        2,
        {"offload_optimizer": {"device": "cpu"}},
        4963924,
        8526384,
        2696784,
        {"all_gather": (4, 1740800, 1305600, 217600), "reduce_scatter": (16, 6963200, 5222400, 870400)},
    ),
    (
        2,
        {},
        6704724,
        0,
        2696784,
        {"all_gather": (4, 1740800, 1305600, 217600), "reduce_scatter": (16, 6963200, 5222400, 870400)},
    ),
    (
        3,
        {"zero_hpz_partition_size": 4},
        7074186,
        0,
        2696784,
        {
            "all_gather (replicate)": (4, 435200, 0, 217600),
            "all_gather (shard)": (13, 6173696, 4630272, 0),
            "reduce_scatter (replicate)": (16, 3481600, 0, 1740800),
            "reduce_scatter (shard)": (16, 6963200, 5222400, 0),
        },
    ),
    (
        3,
        {},
        6889482,
        0,
        2696784,
        {"all_gather": (13, 6173696, 4630272, 771712), "reduce_scatter": (16, 6963200, 5222400, 870400)},
    ),
]


@pytest.mark.parametrize(("stage", "more", "device", "host", "activations", "collectives"), NUMBERS)
def test_plans_of_models_equal_the_recorded_ones(stage, more, device, host, activations, collectives):
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, **more},
    }
    plan = deepspeed.plan(
        SHAPE, config, nodes=2, devices_per_node=4, sequence_length=64, suggest=False, compare_checkpointing=False
    )
    assert (plan.device_bytes, plan.host_bytes, plan.activations) == (device, host, {False: activations})
    moved = {t.title: (t.calls, t.nbytes, t.inside, t.between) for t in plan.transfers}
    assert moved == collectives
