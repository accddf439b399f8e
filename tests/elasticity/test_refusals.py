"""What runs that go on cannot do is refused by name; mostly by one rank."""

import functools
from typing import Any

import pytest
import torch

import deepspeed
from deepspeed.comm.job.job import Job
from deepspeed.config import parse
from deepspeed.elasticity import ElasticSteps
from deepspeed.elasticity.elastic_run import ElasticRun
from deepspeed.errors import CallOrderError, DeepSpeedConfigError
from deepspeed.ops.muon.muon import Muon
from deepspeed.ops.onebit.adam import OneBitAdam
from deepspeed.pipe import PipelineModule
from tests.elasticity.program import make_config, make_data, make_model
from tests.harness import run_ranks


def start(config: dict[str, Any], **more: Any) -> Any:
    return deepspeed.initialize(model=more.pop("model", make_model()), config=config, **more)[0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"gradient_accumulation_steps": 3}, "it follows from the number of ranks; leave it out"),
        ({"train_batch_size": None}, "needs train_batch_size and train_micro_batch_size_per_gpu"),
        ({"train_batch_size": 25}, "25 is not a multiple of train_micro_batch_size_per_gpu 2; 24 or 26 would fit"),
        ({"elasticity": {"continue": True, "max_train_batch_size": 9}}, "elasticity.enabled computes, which is false"),
        ({"elasticity": {"continue": True, "copy_every": 0}}, "copy_every"),
    ],
)
def test_configurations(change, words):
    config = {name: value for name, value in {**make_config(1), **change}.items() if value is not None}
    with pytest.raises(DeepSpeedConfigError, match=words):
        parse(config, dp_world_size=4)


def test_a_seed_that_is_no_integer():
    with pytest.raises(DeepSpeedConfigError, match=r"seed=1\.5: expected an integer, found float"):
        ElasticSteps(None, range(8), 3, seed=1.5)


def test_micro_batches_need_not_be_a_multiple_of_the_ranks():
    batch = parse(make_config(2), dp_world_size=5).batch
    assert (batch.train_batch_size, batch.micro_batch_size, batch.accumulation_steps) == (24, 2, 3)


def refuse_objects() -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    config = make_config(1)
    del config["optimizer"]
    with pytest.raises(DeepSpeedConfigError, match="was given an optimizer object"):
        start(config, model=model, optimizer=optimizer)
    with pytest.raises(DeepSpeedConfigError, match="there is no optimizer"):
        start(config)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    with pytest.raises(DeepSpeedConfigError, match="was given a schedule object"):
        start(make_config(1), lr_scheduler=schedule)
    for make in (OneBitAdam, Muon):
        config = make_config(0)
        del config["optimizer"]
        with pytest.raises(DeepSpeedConfigError, match=f"the optimizer {make.__name__}: it keeps rank-specific states"):
            start(config, optimizer=functools.partial(make, lr=1e-3))


REFUSED = (
    ({"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3}}}, "OneBitAdam: it keeps rank-specific states"),
    ({"zero": {"zero_quantized_gradients": True}}, "gradients: the error-feedback residuals"),
    ({"communication_compression": {"gradients": "int8"}}, "gradients: the error-feedback residuals"),
)


def refuse_features() -> None:
    for change, words in REFUSED:
        with pytest.raises(DeepSpeedConfigError, match=f"elasticity.continue with .*{words}"):
            start(make_config(3 if "zero" in change else 0, **change))


def refuse_axes() -> None:
    """Ranks along axes that a run cannot go on with, and groups that the program has made."""
    with pytest.raises(DeepSpeedConfigError, match="2 ranks share a sequence"):
        start(make_config(1, sequence_parallel_size=2))
    layers = list(make_model())
    for stages in (1, 2):
        pipeline = PipelineModule(layers, num_stages=stages, loss_fn=torch.nn.functional.mse_loss)
        with pytest.raises(DeepSpeedConfigError, match="elasticity.continue with a PipelineModule: the states"):
            start(make_config(0), model=pipeline)
    with pytest.raises(DeepSpeedConfigError, match=r"initialize\(mesh_param=...\) was given process groups or ranks"):
        start(make_config(1), mesh_param=(2, 1))
    cut = {"autotp_size": 2, "partition_config": {"layer_specs": [{"patterns": ["0.weight"]}]}}
    model = deepspeed.tp_model_init(make_model(), 2, config=cut, tp_group=torch.distributed.group.WORLD)
    with pytest.raises(DeepSpeedConfigError, match=r"tp_model_init\(tp_group=...\) was given"):
        start(make_config(1), model=model)
    with pytest.raises(DeepSpeedConfigError, match="use_data_before_expert_parallelism makes the placement"):
        start(make_config(1, use_data_before_expert_parallelism=True))


def refuse_updates_outside_of_steps() -> None:
    engine = start(make_config(1))
    (x, y), *_ = make_data()
    with pytest.raises(CallOrderError, match="updates are made inside `with step:`"):
        for _ in range(12):
            engine.backward(torch.nn.functional.mse_loss(engine(x), y))
            engine.step()
    engine.destroy()


def refuse_steps_of_another_engine() -> None:
    config = make_config(1)
    del config["elasticity"]
    engine = start(config)
    with pytest.raises(CallOrderError, match="elasticity.continue: true"):
        ElasticSteps(engine, make_data(), 3)
    engine.destroy()


def refuse_steps_that_are_not_whole() -> None:
    engine = start(make_config(1))
    steps = ElasticSteps(engine, make_data(), 3)
    assert steps.has_join_requests is steps.has_knocks is False  # the old name
    with pytest.raises(CallOrderError, match="was not entered"):
        for _ in steps:
            pass
    with pytest.raises(CallOrderError, match="expected 1 updates of the engine, found 0"):
        for step in steps:
            with step:
                next(iter(step))
    with pytest.raises(ZeroDivisionError):  # an error of the program stays one
        for step in steps:
            with step:
                raise ZeroDivisionError
    engine.destroy()


def refuse_a_second_engine() -> None:
    first = start(make_config(2))
    with pytest.raises(DeepSpeedConfigError, match="found a second one while the first is in use"):
        start(make_config(2))
    config = make_config(2)
    del config["elasticity"]
    with pytest.raises(DeepSpeedConfigError, match="an engine with elasticity.continue is in use in this process"):
        start(config)
    train(first, 2)
    first.destroy()
    second = start(make_config(2))  # copies of the first one's states are gone
    run = ElasticRun.of(Job.adopt())
    assert run is not None and [key for key, *_ in run.held.listed()] == [[0, 0], [0, 0]], "copies of another engine"
    train(second, 1)
    second.destroy()


def train(engine: Any, total: int) -> None:
    for step in ElasticSteps(engine, make_data(), total):
        with step:
            for x, y in step:
                engine.backward(torch.nn.functional.mse_loss(engine(x), y))
                engine.step()


@pytest.mark.parametrize(
    "refuse",
    [
        refuse_objects,
        refuse_a_second_engine,
        refuse_axes,
        refuse_features,
        refuse_updates_outside_of_steps,
        refuse_steps_of_another_engine,
        refuse_steps_that_are_not_whole,
    ],
)
def test_refusals(refuse):
    run_ranks(refuse, 2 if refuse in (refuse_a_second_engine, refuse_axes) else 1)
