"""What is configured and would do nothing is reported: in a warning, or in an error that names the setting."""

import logging
from typing import Any

import pytest
from torch import nn

import deepspeed
from deepspeed.comm.job.job_mesh import JobMesh
from deepspeed.comm.start.process_group import default_timeout
from deepspeed.config import parse
from deepspeed.config.sections.expert_parallel import ExpertParallel
from deepspeed.config.sections.root import Root
from deepspeed.errors import CallOrderError, DeepSpeedConfigError
from deepspeed.logging import logger
from deepspeed.moe.layer import MoE
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from tests.engine.support import engine_of
from tests.harness import on_ranks, run_ranks
from tests.harness.device import simulated_device
from tests.harness.toy_models import tower


@pytest.mark.parametrize(
    ("zero", "ranks", "words"),
    [
        ({"stage": 1, "zero_quantized_weights": True}, 2, "zero_quantized_weights has no effect: only stage 3"),
        ({"stage": 2, "zero_hpz_partition_size": 2}, 2, "zero_hpz_partition_size has no effect: only stage 3"),
        ({"stage": 0, "mics_shard_size": 2}, 2, "mics_shard_size has no effect: only stage 3"),
        (
            {"stage": 3, "zero_hpz_partition_size": 3},
            2,
            r"partition_size 3 has no effect: .* data-parallel ranks \(2\)",
        ),
        ({"stage": 3, "zero_hpz_partition_size": 2}, 4, None),
        ({"stage": 1, "stage3_max_live_parameters": 5}, 2, None),  # tunes stage 3: a notice is enough
    ],
)
def test_keys_of_stage_3_that_do_nothing(zero: dict[str, Any], ranks: int, words: str | None) -> None:
    found = parse({"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}, dp_world_size=ranks)
    assert set(found.warnings) <= set(found.notices)
    if words is None:
        assert found.warnings == []
    else:
        (line,) = found.warnings
        assert pytest.raises(AssertionError, match=words).matches(AssertionError(line)), line


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _warned() -> list[str]:
    seen = _Warnings()
    logger.addHandler(seen)
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    topology = PipeModelDataParallelTopology(num_pp=1, num_mp=2, num_dp=1)
    piped = PipelineModule([nn.Linear(4, 4)], topology=topology, loss_fn=nn.MSELoss())
    deepspeed.initialize(model=piped, config=config)[0].destroy()
    deepspeed.utils.groups.set_mesh(None)
    section = {"pipeline": {"activation_checkpoint_interval": 1}}
    deepspeed.initialize(model=nn.Linear(4, 4), config={**config, **section})[0].destroy()
    deepspeed.initialize(
        model=nn.Linear(4, 4), config={**config, "zero_optimization": {"stage": 1, "zero_quantized_weights": True}}
    )[0].destroy()
    logger.removeHandler(seen)
    return seen.texts


def test_axes_and_sections_that_do_nothing() -> None:
    found, others = run_ranks(_warned, 2)
    assert others == []
    for words in (
        "2 ranks that share layers: expected tensor_parallel.autotp_size 2",
        "pipeline (activation_checkpoint_interval) has no effect: expected a deepspeed.pipe.PipelineModule, found Lin",
        "zero_optimization.zero_quantized_weights has no effect",
    ):
        assert sum(words in text for text in found) == 1, (words, found)


def test_layers_that_an_engine_would_never_drop() -> None:
    with simulated_device():
        model = tower()
        engine = engine_of(model, 1)
        with pytest.raises(CallOrderError, match=r"progressive_layer_drop\(<Tower>\): .* before initialize"):
            deepspeed.progressive_layer_drop(model, "layers")
        engine.destroy()


def test_neighbors_beside_experts_are_named() -> None:
    for key in ("zero_hpz_partition_size", "mics_shard_size"):
        with simulated_device(ranks=4):
            model = nn.Sequential(MoE(4, nn.Linear(4, 4), 4, 2))
            with pytest.raises(
                DeepSpeedConfigError, match=rf"zero_optimization.{key} 2 with expert layers of ep_size 2"
            ):
                engine_of(model, 3, zero={key: 2})


@on_ranks(2)
def test_sizes_that_do_not_divide_name_their_setting() -> None:
    mesh = JobMesh(None, (1, 2), None, default_timeout())
    over_sequence = Root(expert_parallel=ExpertParallel(enabled=True, autoep_size=2))
    assert mesh.mesh(over_sequence).size("sequence") == 2
    root = Root(expert_parallel=ExpertParallel(enabled=True, autoep_size=3))
    with pytest.raises(DeepSpeedConfigError, match=r"expert_parallel.autoep_size 3: expected a divisor of the 1 data"):
        mesh.mesh(root)
