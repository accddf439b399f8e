"""The coercions, which are the same everywhere."""

import math
from typing import Any

import numpy as np
import pytest

from deepspeed.config import parse
from deepspeed.config.types import to_bool, to_dtype, to_float, to_int
from tests.config.support import only_problem, read


@pytest.mark.parametrize(
    ("value", "number"),
    [(500_000_000, 500_000_000), (5e8, 500_000_000), ("500", 500), (" 7 ", 7), ("-3", -3), ("5e8", 500_000_000)],
)
def test_integers(value: Any, number: int) -> None:
    result = to_int(value)
    assert result == number and type(result) is int


@pytest.mark.parametrize(
    "value", [0.5, "5e-8", "1e400", "1_000", "0.5", None, True, "", "abc", math.inf, math.nan, [], "1 2"]
)
def test_what_is_no_integer(value: Any) -> None:
    with pytest.raises(ValueError):
        to_int(value)


@pytest.mark.parametrize(("value", "number"), [(1, 1.0), ("1e-4", 1e-4), (".5", 0.5), ("3", 3.0), (math.inf, math.inf)])
def test_numbers(value: Any, number: float) -> None:
    result = to_float(value)
    assert result == number and type(result) is float


@pytest.mark.parametrize("value", ["abc", "", None, False, math.nan, "nan", "inf", "1_0", {}])
def test_what_is_no_number(value: Any) -> None:
    with pytest.raises(ValueError):
        to_float(value)


@pytest.mark.parametrize("word", [True, 1, 1.0, "true", "True", "YES", "on", "t", "Y", "1"])
def test_yes(word: Any) -> None:
    assert to_bool(word) is True


@pytest.mark.parametrize("word", [False, 0, 0.0, "false", "No", "OFF", "f", "n", "0"])
def test_no(word: Any) -> None:
    assert to_bool(word) is False


@pytest.mark.parametrize("word", [2, -1, "", "maybe", None, 0.5, "10", []])
def test_what_is_neither(word: Any) -> None:
    with pytest.raises(ValueError):
        to_bool(word)


@pytest.mark.parametrize("word", ["bf16", "BF16", "bfloat16", "torch.bfloat16", " torch.BFloat16 "])
def test_dtype_names(word: str) -> None:
    assert to_dtype(word) == "bf16"


def test_torch_dtypes_by_name() -> None:
    import torch

    assert [to_dtype(each) for each in (torch.float32, torch.float16, torch.bfloat16)] == ["fp32", "fp16", "bf16"]
    for other in (torch.int8, torch.float64, "int8", "float64", 16, None):
        with pytest.raises(ValueError):
            to_dtype(other)


@pytest.mark.parametrize("stage", [2, "2", 2.0])
def test_stage(stage: Any) -> None:
    assert read({"zero_optimization": {"stage": stage}}).root.zero_optimization.stage == 2


def test_stage_true_is_one() -> None:
    assert read({"zero_optimization": {"stage": True}}).root.zero_optimization.stage == 1


def test_the_same_coercions_in_every_section() -> None:
    root = read(
        {
            "zero_optimization": {"stage": 3, "reduce_bucket_size": 2e8},
            "aio": {"block_size": "4096", "single_submit": "yes"},
            "activation_checkpointing": {"profile": "on"},
            "checkpoint": {"tag_validation": "FAIL", "load_universal": "no"},
            "torch_autocast": {"enabled": "t", "dtype": "torch.float16"},
            "communication_data_type": "FP32",
            "gradient_allreduce_op": "Mean",
            "steps_per_print": "50",
            "gradient_clipping": "0.5",
        }
    ).root
    assert root.zero_optimization.reduce_bucket_size == 200_000_000
    assert root.aio.block_size == 4096 and root.aio.single_submit is True
    assert root.activation_checkpointing.profile is True
    assert root.checkpoint.tag_validation == "Fail" and root.checkpoint.load_universal is False
    assert root.torch_autocast.dtype == "fp16" and root.communication_data_type == "fp32"
    assert root.gradient_allreduce_op == "mean" and root.steps_per_print == 50 and root.gradient_clipping == 0.5


def test_scalars_of_numpy_and_torch() -> None:
    torch = pytest.importorskip("torch")
    config = {
        "train_batch_size": np.int64(8),
        "gradient_clipping": np.float32(0.5),
        "steps_per_print": np.float64(math.inf),
        "zero_optimization": {"stage": np.int32(2), "reduce_bucket_size": np.float32(5e8), "overlap_comm": np.True_},
        "optimizer": {"type": "SGD", "params": {"lr": torch.tensor(0.25), "nesterov": np.bool_(False)}},
    }
    root = parse(config).root
    assert (root.train_batch_size, root.gradient_clipping, root.steps_per_print) == (8, 0.5, None)
    assert type(root.train_batch_size) is int and root.zero_optimization.stage == 2
    assert root.zero_optimization.reduce_bucket_size == 500_000_000 and root.zero_optimization.overlap_comm is True
    assert root.optimizer is not None and root.optimizer.params == {"lr": 0.25, "nesterov": False}
    assert "expected an integer > 0" in only_problem({"train_batch_size": np.array([8])})


def test_a_number_larger_than_any_float() -> None:
    assert only_problem({"gradient_clipping": 10**400}).startswith("gradient_clipping: expected a number >= 0")
    assert read({"zero_optimization": {"reduce_bucket_size": 10**400}}).root.zero_optimization.reduce_bucket_size


def test_null_where_the_original_package_has_no_default() -> None:
    root = read({"sequence_parallel_size": None, "seq_parallel_communication_data_type": None}).root
    assert root.sequence_parallel_size == 1 and root.seq_parallel_communication_data_type == "fp32"


def test_steps_per_print_never() -> None:
    assert read({"steps_per_print": math.inf}).root.steps_per_print is None
    assert read({"steps_per_print": None}).root.steps_per_print is None
    assert "steps_per_print: expected an integer > 0, or null, found 0" == only_problem({"steps_per_print": 0})


def test_infinite_clipping_never_clips() -> None:
    assert read({"gradient_clipping": math.inf}).root.gradient_clipping == math.inf
    assert only_problem({"fp16": {"loss_scale": math.inf}}).startswith("fp16.loss_scale: expected a number >= 0")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"fp16": True}, 'fp16: expected an object such as {"enabled": true}, found true'),
        ({"fp16": "auto-ish"}, 'fp16: expected an object such as {"enabled": true}, found "auto-ish"'),
        ({"zero_optimization": "abc"}, 'zero_optimization: expected an object such as {...}, found "abc"'),
        ({"zero_optimization": {"offload_param": True}}, "zero_optimization.offload_param: expected an object"),
        ({"optimizer": "Adam"}, "optimizer: expected an object"),
        ({"optimizer": {"type": "Adam", "params": 3}}, "optimizer.params: expected an object"),
        ({"optimizer": {"type": 3}}, "optimizer.type: expected the name"),
        ({"wandb": {"project": None}}, "wandb.project: expected text, found null"),
        ({"amp": {"loss_scale": "abc"}}, 'amp.loss_scale: expected a number > 0 or "dynamic", or null, found "abc"'),
        (
            {"elasticity": {"micro_batch_sizes": [2, 0]}},
            "elasticity.micro_batch_sizes: expected a list of integers > 0",
        ),
    ],
)
def test_wrong_types_name_what_was_expected(config: dict[str, Any], words: str) -> None:
    assert only_problem(config).startswith(words)


def test_null_sections_are_absent() -> None:
    assert (
        read({"fp16": None, "aio": None, "optimizer": None, "scheduler": None, "zero_optimization": None}).notices == []
    )


@pytest.mark.parametrize("word", [None, "none", "None", ""])
def test_no_path_in_the_ways_accelerate_writes_it(word: Any) -> None:
    parsed = read({"zero_optimization": {"stage": 3, "offload_param": {"device": "none", "nvme_path": word}}})
    assert parsed.root.zero_optimization.offload_param is not None
    assert parsed.root.zero_optimization.offload_param.nvme_path is None
    assert parsed.notices == []


@pytest.mark.parametrize(
    ("given", "value"), [("norm", ["norm"]), (["a", "b"], ["a", "b"]), ("auto", "auto"), (None, None)]
)
def test_modules_kept_in_fp32(given: Any, value: Any) -> None:
    parsed = read({"data_types": {"keep_in_fp32_modules": given}})
    assert parsed.root.data_types.keep_in_fp32_modules == value and parsed.notices == []
