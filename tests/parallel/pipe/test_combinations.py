"""Pipelines with everything else: precisions, overflow, offload, frozen and empty stages, recomputation, 3D layouts."""

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from tests.harness.pool import run_ranks
from tests.parallel.pipe import support


def _several(stages, cells):
    """Losses and norms of several short trainings in one job."""
    return [support.train(support.engine_of(stages, **cell), cell["count"], 3) for cell in cells]


CELLS = [
    {"stage": 1, "count": 3, "more": {"bf16": {"enabled": True}}},
    {"stage": 2, "count": 3, "more": {"fp16": {"enabled": True, "initial_scale_power": 8}}},
    {"stage": 3, "count": 2, "more": {"bf16": {"enabled": True}, "zero": {"offload_optimizer": {"device": "cpu"}}}},
    {"stage": 1, "count": 3, "activation_checkpoint_interval": 1},
    {"stage": 3, "count": 3, "activation_checkpoint_interval": 2, "schedule": "zb-h1"},
    {"stage": 0, "count": 1},  # fewer micro-batches than stages
]


def test_like_one_stage():
    alone, two = run_ranks(_several, 1, 1, CELLS)[0], run_ranks(_several, 2, 2, CELLS)
    assert two[0] == two[1]
    for cell, expected, found in zip(CELLS, alone, two[0], strict=True):
        tolerance = 2e-2 if any(name in cell.get("more", {}) for name in ("bf16", "fp16")) else 2e-6
        torch.testing.assert_close(
            torch.tensor(found),
            torch.tensor(expected),
            rtol=tolerance,
            atol=1e-6,
            msg=lambda text, c=cell: f"{c} {text}",
        )


def _overflow():
    """An overflow on one stage skips the update on both."""
    engine = support.engine_of(2, 1, 2, more={"fp16": {"enabled": True, "initial_scale_power": 30, "hysteresis": 1}})
    before = support.weights(engine)
    support.train(engine, 2, 1)
    same = all(torch.equal(value, before[name]) for name, value in support.weights(engine).items())
    return engine.skipped_steps, same, engine.optimizer.cur_scale


def test_overflow_is_the_jobs():
    first, second = run_ranks(_overflow, 2)
    assert first == second and first[:2] == (1, True)


def _shift(value):
    return value[0] + 1, value[1]


def _idle_stages():
    """The middle stage has only functions, and what the first one has is frozen."""
    torch.manual_seed(3)
    layers = [
        LayerSpec(support.Embed), LayerSpec(support.Block, 5), _shift, _shift, LayerSpec(support.Block, 9),
        LayerSpec(_Head),
    ]  # fmt: skip
    stages = 3 if torch.distributed.get_world_size() == 3 else 1
    bounds = [0, 2, 4, 6] if stages == 3 else [0, 6]
    module = PipelineModule(layers, num_stages=stages, loss_fn=support.loss_fn, partition_method=bounds)
    for name, parameter in module.named_parameters():
        if name.startswith(("0.", "1.")):
            parameter.requires_grad_(False)
    engine, *_ = deepspeed.initialize(model=module, config=support.config(1, 2))
    return support.train(engine, 2, 3)


class _Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(support.WIDTH, support.VOCABULARY)

    def forward(self, value):
        return self.out(value[0])


def test_stages_that_train_nothing():
    expected = run_ranks(_idle_stages, 1)[0]
    for found in run_ranks(_idle_stages, 3):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=2e-6, atol=1e-6)


class Doubled(nn.Module):
    """Multiplies what passes between blocks by a trained factor, 2 at first."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(2.0))

    def forward(self, value):
        return value[0] * self.factor, value[1]


def _schedules_of_the_configuration():
    """Losses with a schedule of the program, and of the configuration."""

    def start(given, schedule=None, **more):
        torch.manual_seed(3)
        layers = support.layers()
        layers.insert(-1, Doubled())  # a module, which is not built again
        module = PipelineModule(layers, num_stages=2, loss_fn=support.loss_fn, schedule=schedule)
        config = support.config(1, 4, **({} if schedule else {"pipeline": {"schedule": "interleaved"}}), **more)
        return deepspeed.initialize(model=module, config=config, **given(module))[0]

    def trained(module):
        return [parameter for parameter in module.parameters() if parameter.requires_grad]

    def two_groups(module):
        matrices = [parameter for parameter in trained(module) if parameter.dim() > 1]
        return [{"params": matrices}, {"params": [p for p in trained(module) if p.dim() < 2], "weight_decay": 0.0}]

    made = [
        start(lambda module: {"model_parameters": trained(module)}, schedule="interleaved"),
        start(lambda module: {}),
        start(lambda module: {"model_parameters": trained(module)}),
        start(lambda module: {"model_parameters": filter(lambda p: p.requires_grad, module.parameters())}),
        start(lambda module: {"model_parameters": [{"params": trained(module), "lr": 1e-2}]}),
        start(lambda module: {"optimizer": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)}),
    ]
    losses = [support.train(engine, 4) for engine in made]
    for given in (
        lambda module: {"model_parameters": two_groups(module)},
        lambda module: {"optimizer": torch.optim.SGD(trained(module), lr=0.1)},
    ):
        with pytest.raises(DeepSpeedConfigError, match="built again.* Pass schedule .* to PipelineModule"):
            start(given)
    return losses


def test_a_schedule_of_the_configuration_trains_the_layers_that_it_builds():
    for first, *others in run_ranks(_schedules_of_the_configuration, 2):
        for found in others:
            torch.testing.assert_close(torch.tensor(found), torch.tensor(first), rtol=2e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "dualpipev"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("count", [4, 5])
def test_every_schedule_at_every_stage(schedule, stage, count):
    from tests.parallel.pipe.test_training import check

    check(2, 2, stage, count, schedule=schedule)


def _three_axes(pipe, tensor, data, stage):
    """Layers cut by the configuration's patterns, inside a topology that has a tensor axis."""
    torch.manual_seed(3)
    topology = PipeModelDataParallelTopology(num_pp=pipe, num_mp=tensor, num_dp=data)
    layers = [
        TiedLayerSpec("embed", support.Embed),
        *[LayerSpec(support.Block, inner) for inner in (8, 12, 4, 8)],
        TiedLayerSpec("embed", support.Embed, forward_fn=support.head),
    ]
    module = PipelineModule(layers, topology=topology, loss_fn=support.loss_fn)
    cut = {
        "autotp_size": tensor,
        "partition_config": {
            "layer_specs": [
                {"patterns": [r".*\.up\.weight"], "partition_type": "column"},
                {"patterns": [r".*\.down\.weight"], "partition_type": "row"},
            ]
        },
    }
    config = support.config(stage, 3, **({"tensor_parallel": cut} if tensor > 1 else {}))
    engine, *_ = deepspeed.initialize(model=module, config=config)
    return support.train(engine, 3, 3)


@pytest.mark.parametrize(
    ("pipe", "tensor", "data", "stage"),
    [(2, 2, 1, 1), (2, 1, 2, 2), pytest.param(2, 2, 2, 3, marks=pytest.mark.slow)],
)
def test_three_axes(pipe, tensor, data, stage):
    expected = run_ranks(_three_axes, data, 1, 1, data, 0)[0]
    for found in run_ranks(_three_axes, pipe * tensor * data, pipe, tensor, data, stage, timeout=240):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=5e-6, atol=2e-6)
