"""Curricula with pipelines: lengths by the batch function, samples by the configured sampler."""

import numpy
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import Dataset

import deepspeed
from deepspeed.data.curriculum import DeepSpeedDataSampler, shortened
from deepspeed.data.indexed import write_dataset
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.pipe import PipelineModule
from tests.data.test_curriculum_seqlen import SECTION
from tests.harness import on_ranks, run_ranks
from tests.parallel.pipe.support import VOCABULARY, config, engine_of, layers, loss_fn

COUNT = 30


class Pairs(Dataset):
    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.full((6,), number % VOCABULARY)
        return tokens, tokens


RANDOM_LTD = {
    "enabled": True,
    "data_routing": {
        "enabled": True,
        "random_ltd": {
            "enabled": True,
            "total_layer_num": 4,
            "random_ltd_layer_num": 1,
            "random_ltd_layer_id": [1],
            "random_ltd_schedule": {
                "min_value": 2,
                "max_value": 4,
                "schedule_type": "fixed_linear",
                "schedule_config": {"require_steps": 4, "seq_per_step": 1},
            },
        },
    },
}


@on_ranks(2)
def test_the_batch_function_cuts():
    engine = engine_of(2, 1, 2, {"curriculum_learning": SECTION})
    seen = []

    def cut(item):
        length = engine.curriculum_scheduler_legacy.get_current_difficulty()
        seen.append(length)
        return shortened(item, length)

    engine.set_batch_fn(cut)
    tokens = torch.zeros(2, 12, dtype=torch.long)
    for _ in range(4):
        engine.train_batch(iter([(tokens, tokens)] * 2))
    for name, section in (
        ("progressive_layer_drop", {"progressive_layer_drop": {"enabled": True}}),
        ("data_efficiency.data_routing.random_ltd", {"data_efficiency": RANDOM_LTD}),
    ):
        with pytest.raises(DeepSpeedConfigError, match=f"{name} with a PipelineModule"):
            engine_of(2, 1, 2, section)
    assert seen == [2, 2, 4, 4, 4, 4, 6, 6]


def _samples(metric):
    learning = {"enabled": True, "curriculum_metrics": {"number": metric}}
    efficiency = {"enabled": True, "data_sampling": {"enabled": True, "curriculum_learning": learning}}

    def started():
        torch.manual_seed(3)
        module = PipelineModule(layers(), num_stages=2, loss_fn=loss_fn)
        whole = config(1, 2, data_efficiency=efficiency)
        return deepspeed.initialize(model=module, training_data=Pairs(), config=whole)[0]

    engine = started()
    for _ in range(2):
        engine.train_batch()
    state = engine.training_dataloader.sampler_state()
    for _ in range(2):
        engine.train_batch()
    again = started()
    again.training_dataloader.load_sampler_state(state)  # as loading a checkpoint does
    for _ in range(2):
        again.train_batch()
    assert again.training_dataloader.sampler_state() == engine.training_dataloader.sampler_state()
    states = [None] * 2
    dist.all_gather_object(states, engine.training_dataloader.sampler_state())
    assert states[0] == states[1], "both stages see the same samples"
    expected = DeepSpeedDataSampler(efficiency, COUNT, 2, 0, 1, None, 2)
    batches = iter(expected)
    for _ in range(8):
        next(batches)
    return states[0] == expected.state_dict()


def test_all_stages_see_the_samples_that_the_curriculum_allows(tmp_path):
    write_dataset(tmp_path / "samples", numpy.arange(COUNT), numpy.ones(COUNT, int))
    write_dataset(tmp_path / "values", numpy.arange(1, COUNT + 1), numpy.ones(COUNT, int))
    metric = {
        "index_to_sample_path": str(tmp_path / "samples"),
        "index_to_metric_path": str(tmp_path / "values"),
        "difficulty_type": "value",
        "min_difficulty": 4,
        "max_difficulty": COUNT,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 6, "difficulty_step": 2},
    }
    assert run_ranks(_samples, 2, metric) == [True, True]
