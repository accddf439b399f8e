"""Sections that would undo each other's work on ranks that share layers or sequences are refused by name."""

from typing import Any

import pytest

import deepspeed
from deepspeed.errors import DeepSpeedConfigError
from tests.harness import on_ranks
from tests.parallel.tensor.support import adamw, llama

SPARSE = {"sparse_attention": {"mode": "fixed", "block": 4, "apply_to": "model"}}
SCHEDULE = {"schedule_type": "fixed_linear", "schedule_config": {"total_curriculum_step": 10, "difficulty_step": 8}}
LENGTHS = {"curriculum_learning": {"enabled": True, "curriculum_type": "seqlen", "min_difficulty": 8, **SCHEDULE}}
LENGTHS["curriculum_learning"]["max_difficulty"] = 32
STEPS = {"schedule_type": "fixed_linear", "schedule_config": {"require_steps": 10, "seq_per_step": 8}}
LTD = {
    **{"enabled": True, "total_layer_num": 2, "random_ltd_layer_num": 1, "random_ltd_layer_id": [1]},
    "random_ltd_schedule": {"min_value": 8, "max_value": 32, **STEPS},
}
TOKENS = {"data_efficiency": {"enabled": True, "data_routing": {"enabled": True, "random_ltd": LTD}}}
FEW_BITS = {"weight_quantization": {"enabled": True, "quantized_initialization": {"num_bits": 8}}}

CELLS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (SPARSE, {"sequence_parallel_size": 2}, r"sparse_attention.apply_to .* 2 ranks share a sequence"),
    (LENGTHS, {"sequence_parallel_size": 2}, r"curriculum_learning.curriculum_type .* cut whole sequences before"),
    (TOKENS, {"sequence_parallel_size": 2}, r"random_ltd where 2 ranks share a sequence"),
    (SPARSE, {"tensor_parallel": {"autotp_size": 2}}, r"sparse_attention.apply_to .* 2 ranks share a layer"),
    (FEW_BITS, {"tensor_parallel": {"autotp_size": 2}}, r"weight_quantization.enabled where 2 ranks share a layer"),
]


@on_ranks(2)
def test_each_is_refused_before_the_model_is_touched() -> None:
    for section, axis, words in CELLS:
        model = llama(attn_implementation="sdpa")
        before = [type(module) for module in model.modules()]
        settings = {"train_micro_batch_size_per_gpu": 2, **section, **axis}
        with pytest.raises(DeepSpeedConfigError, match=words):
            deepspeed.initialize(model=model, optimizer=adamw(model.parameters()), config=settings)
        assert [type(module) for module in model.modules()] == before
