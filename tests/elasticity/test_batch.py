"""The batch of the section ``elasticity``: known values, its rules, and training with it."""

import json
import os

import pytest
import torch

import deepspeed
from deepspeed.config import DeepSpeedConfig, parse
from deepspeed.config.elastic_batch import choose_batch, highly_composite_numbers
from deepspeed.config.sections.elasticity import Elasticity
from deepspeed.elasticity import (
    ElasticityConfig,
    ElasticityConfigError,
    ElasticityError,
    ElasticityIncompatibleWorldSize,
    compute_elastic_config,
    elasticity_enabled,
    ensure_immutable_elastic_config,
)
from deepspeed.errors import DeepSpeedConfigError
from tests.harness.pool import run_ranks

VERSION = "0.19.6"
BASE = {"enabled": True, "version": 0.1, "max_train_batch_size": 2000, "micro_batch_sizes": [2, 4, 6]}
LARGE = {**BASE, "max_train_batch_size": 10000, "micro_batch_sizes": [8, 12, 16, 17], "min_gpus": 32, "max_gpus": 1500}
NODES = {**BASE, "version": 0.2, "num_gpus_per_node": 8}


def config(section, **changes):
    return {"elasticity": {**section, **changes}}


def ranks(section, **changes):
    return compute_elastic_config(config(section, **changes), VERSION)


def test_known_values_of_version_0_1():
    batch, counts = ranks(BASE)
    assert (batch, len(counts), counts[:12]) == (1680, 32, [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 15])
    batch, counts = ranks(LARGE)
    assert (batch, len(counts), counts[:9]) == (9792, 23, [32, 34, 36, 48, 51, 64, 68, 72, 96])
    assert ranks(BASE, micro_batch_sizes=[1, 2, 3, 7], max_train_batch_size=32, max_gpus=1500) == (
        24, [1, 2, 3, 4, 6, 8, 12, 24],
    )  # fmt: skip
    assert ranks(BASE, micro_batch_sizes=[8, 10, 12], max_train_batch_size=100, max_gpus=1500) == (
        96, [1, 2, 3, 4, 6, 8, 12],
    )  # fmt: skip
    assert ranks(BASE, micro_batch_sizes=[1, 2, 4], max_train_batch_size=64, max_gpus=16) == (
        60, [1, 2, 3, 4, 5, 6, 10, 12, 15],
    )  # fmt: skip


def test_known_values_of_version_0_2(monkeypatch):
    batch, counts, micro = compute_elastic_config(config(NODES), VERSION, world_size=24)
    assert (batch, len(counts), counts[:7], micro) == (1920, 16, [8, 16, 24, 32, 40, 48, 64], 4)
    assert compute_elastic_config(config(NODES), VERSION, world_size=56) == (1904, [56], 2)
    monkeypatch.setenv("WORLD_SIZE", "56")
    assert compute_elastic_config(config(NODES), VERSION) == (1904, [56])
    assert compute_elastic_config(config(NODES), VERSION, return_microbatch=True) == (1904, [56], 2)
    section = {**LARGE, "version": 0.2, "num_gpus_per_node": 8, "model_parallel_size": 4}
    batch, counts, micro = compute_elastic_config(config(section), VERSION, world_size=64)
    # 540 samples for each of 16 data-parallel ranks. Upstream divided by all 64 and found no micro-batch.
    assert (batch, len(counts), counts[:4], micro) == (8640, 24, [8, 10, 12, 16], 12)


def test_world_size_and_micro_batch(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert compute_elastic_config(config(LARGE), VERSION, world_size=64)[2] == 17
    with pytest.raises(ElasticityIncompatibleWorldSize, match="128 data-parallel ranks cannot share .* 9792"):
        compute_elastic_config(config(LARGE), VERSION, world_size=128)
    for section in (LARGE, NODES):
        with pytest.raises(ElasticityConfigError, match="WORLD_SIZE is not set"):
            compute_elastic_config(config(section), VERSION, return_microbatch=True)
    monkeypatch.setenv("WORLD_SIZE", "64")
    assert compute_elastic_config(config(LARGE), VERSION, return_microbatch=True)[2] == 17
    with pytest.raises(ElasticityIncompatibleWorldSize, match="multiple of elasticity.model_parallel_size 4"):
        compute_elastic_config(config(NODES, model_parallel_size=4), VERSION, world_size=6)
    with pytest.raises(ElasticityIncompatibleWorldSize, match="world_size=-3: expected a positive multiple"):
        compute_elastic_config(config(NODES), VERSION, world_size=-3)
    with pytest.raises(ElasticityIncompatibleWorldSize, match="at least 2002 samples"):
        compute_elastic_config(config(NODES), VERSION, world_size=1001)
    batch, counts, micro = compute_elastic_config(config(NODES, prefer_larger_batch=False), VERSION, world_size=56)
    assert (batch, counts, micro) == (1680, [56], 2)


@pytest.mark.parametrize("version", [0.1, 0.2])
@pytest.mark.parametrize("micros", [[1], [3, 5], [2, 3, 7], [8, 10, 12]])
def test_every_number_of_ranks_gets_whole_micro_batches(version, micros):
    section = Elasticity(
        version=version, max_train_batch_size=97, micro_batch_sizes=micros, min_gpus=1, max_gpus=24, num_gpus_per_node=2
    )
    for count in choose_batch(section, 2).data_ranks:
        chosen = choose_batch(section, count)
        assert 0 < chosen.train_batch_size <= 97
        assert chosen.train_batch_size % (count * chosen.micro_batch_size) == 0
        assert chosen.micro_batch_size in micros


def test_highly_composite_numbers_have_more_divisors_than_all_before():
    numbers = highly_composite_numbers()
    assert (len(numbers), numbers[-1]) == (38, 720720)
    record, found = 0, []
    for number in range(1, 5041):
        divisors = sum(
            1 + (number // small != small) for small in range(1, 71) if number % small == 0 and small**2 <= number
        )
        if divisors > record:
            record = divisors
            found.append(number)
    assert list(numbers[: len(found)]) == found


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"micro_batch_sizes": [2, 4000]}, "elasticity.micro_batch_sizes: 4000 is more than max_train_batch_size"),
        ({"micro_batch_sizes": []}, "expected at least one number of samples"),
        ({"micro_batch_sizes": "x"}, "elasticity.micro_batch_sizes: expected a list"),
        ({"version": 0.3}, "elasticity.version"),
        ({"min_gpus": 5, "max_gpus": 3}, "elasticity.min_gpus: 5 is more than max_gpus 3"),
        ({"model_parallel_size": 2}, "elasticity.model_parallel_size: 2 needs elasticity.version 0.2"),
        ({"version": 0.2, "num_gpus_per_node": 3, "model_parallel_size": 2}, "expected a multiple of model_parallel"),
    ],
)
def test_wrong_sections(changes, message):
    with pytest.raises(ElasticityConfigError, match=message):
        ranks(BASE, **changes)
    with pytest.raises(DeepSpeedConfigError, match=message):
        parse(config(BASE, **changes), dp_world_size=4)


@pytest.mark.parametrize(
    ("more", "ranks", "batch"),
    [({"max_train_batch_size": 4, "max_gpus": 16}, 2, 4), ({"max_train_batch_size": 64, "max_gpus": 4}, 4, 64)],
)
def test_ranks_share_a_batch_that_no_whole_node_can(more, ranks, batch):
    section = {
        "enabled": True,
        "version": 0.2,
        "num_gpus_per_node": 8,
        "micro_batch_sizes": [1, 2],
        "min_gpus": 1,
        **more,
    }
    assert compute_elastic_config({"elasticity": section}, "0.16.0", world_size=ranks)[:2] == (batch, [ranks])


def test_what_the_calls_refuse():
    with pytest.raises(ValueError, match="expected a dict, found str"):
        compute_elastic_config("x.json", VERSION)
    with pytest.raises(ElasticityConfigError, match="expected a section 'elasticity'"):
        compute_elastic_config({}, VERSION)
    with pytest.raises(ElasticityConfigError, match="elasticity.enabled: expected true"):
        compute_elastic_config(config(BASE, enabled=False), VERSION)
    for target in ("0.3.7", "x"):
        with pytest.raises(ElasticityError, match="target_deepspeed_version"):
            compute_elastic_config(config(BASE), target)
    with pytest.raises(ElasticityConfigError, match="micro_batch_sizes: expected with elasticity.enabled"):
        ElasticityConfig({"enabled": True, "max_train_batch_size": 8})
    with pytest.raises(ElasticityError, match="no batch up to max_train_batch_size 4"):
        ranks(BASE, max_train_batch_size=4, micro_batch_sizes=[2], min_gpus=3)
    assert (
        elasticity_enabled(config(BASE)) and not elasticity_enabled({}) and not elasticity_enabled({"elasticity": {}})
    )


def test_the_section_as_an_object():
    section = ElasticityConfig({**NODES, "prefer_larger_batch": False})
    assert (section.max_acceptable_batch_size, section.micro_batches, section.version) == (2000, [2, 4, 6], 0.2)
    assert (section.min_gpus, section.max_gpus, section.num_gpus_per_node) == (1, 10000, 8)
    assert (section.prefer_larger_batch_size, section.ignore_non_elastic_batch_info) == (False, False)
    assert json.loads(str(section)) == section.repr()
    assert ElasticityConfig({}).enabled is False


def test_a_scheduler_must_have_read_the_same(monkeypatch, caplog):
    monkeypatch.delenv("DEEPSPEED_ELASTICITY_CONFIG", raising=False)
    ensure_immutable_elastic_config(BASE)
    monkeypatch.setenv("DEEPSPEED_ELASTICITY_CONFIG", json.dumps({**BASE, "min_gpus": 7}))
    ensure_immutable_elastic_config(BASE)
    parse(config(BASE), dp_world_size=4)
    monkeypatch.setenv("DEEPSPEED_ELASTICITY_CONFIG", json.dumps({**BASE, "micro_batch_sizes": [2]}))
    with pytest.raises(ElasticityConfigError, match=r"elasticity.micro_batch_sizes: \[2, 4, 6\] here, but \[2\]"):
        ensure_immutable_elastic_config(BASE)
    with pytest.raises(DeepSpeedConfigError, match=r"elasticity.micro_batch_sizes: \[2, 4, 6\] here, but \[2\]"):
        parse(config(BASE), dp_world_size=4)
    monkeypatch.setenv("DEEPSPEED_ELASTICITY_CONFIG", "nonsense")
    with pytest.raises(ElasticityConfigError, match="expected section elasticity as a JSON object, found 'nonsense'"):
        ensure_immutable_elastic_config(BASE)


def test_the_batch_keys_come_from_the_section(monkeypatch):
    parsed = parse({**config(BASE), "train_batch_size": "auto"}, dp_world_size=8)
    root = parsed.root
    assert (root.train_batch_size, root.train_micro_batch_size_per_gpu, root.gradient_accumulation_steps) == (
        1680,
        6,
        35,
    )
    assert parsed.batch.micro_batch_size == 6
    with pytest.raises(DeepSpeedConfigError, match="train_batch_size: is chosen by section elasticity"):
        parse({**config(BASE), "train_batch_size": 8}, dp_world_size=8)
    given = {**config(BASE, ignore_non_elastic_batch_info=True), "train_micro_batch_size_per_gpu": 1}
    parsed = parse(given, dp_world_size=8)
    assert parsed.batch.micro_batch_size == 6
    assert "elasticity replaces train_micro_batch_size_per_gpu" in parsed.notices
    with pytest.raises(DeepSpeedConfigError, match="11 data-parallel ranks cannot share elasticity's batch of 1680"):
        parse(config(BASE), dp_world_size=11)
    assert parse(config(NODES, model_parallel_size=2), dp_world_size=12).batch.train_batch_size == 1920
    assert parse(config(BASE)).batch is None
    assert parse({"train_batch_size": 8, **config(BASE, enabled=False)}, dp_world_size=2).batch.micro_batch_size == 4
    monkeypatch.setenv("WORLD_SIZE", "3")
    found = DeepSpeedConfig(config(BASE))
    assert (found.elasticity_enabled, found.train_batch_size, found.gradient_accumulation_steps) == (True, 1680, 140)


def _train(section):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    settings = {"elasticity": section, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "gradient_clipping": 0}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
    data = torch.arange(36.0).reshape(12, 3) / 36
    size, micro, rank = engine.train_batch_size(), engine.train_micro_batch_size_per_gpu(), int(os.environ["RANK"])
    share = data[:size].chunk(int(os.environ["WORLD_SIZE"]))[rank]
    for batch in share.split(micro):
        engine.backward(engine(batch).pow(2).mean())
        engine.step()
    assert engine.elasticity_enabled()
    return size, micro, engine.global_steps, [float(value) for value in engine.module.weight.detach().flatten()]


def test_training_at_two_numbers_of_ranks_uses_one_batch():
    section = {**BASE, "max_train_batch_size": 12, "micro_batch_sizes": [2, 3], "prefer_larger_batch": True}
    ((size, _, steps, alone),) = run_ranks(_train, 1, section)
    both = run_ranks(_train, 2, section)
    assert (size, steps) == (12, 1)
    assert [(found[0], found[2]) for found in both] == [(12, 1)] * 2
    assert both[0][3] == pytest.approx(alone, abs=1e-6)


@pytest.mark.parametrize("spelling", [1, "true", "YES"])
def test_spellings_of_the_switch(spelling):
    assert ranks(BASE, enabled=spelling) == ranks(BASE)
    with pytest.raises(ElasticityConfigError, match="expected true, found false"):
        ranks(BASE, enabled="false")
