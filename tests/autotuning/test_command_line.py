"""The arguments of the script in a trial."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepspeed.autotuning.command_line import find_config, with_config, with_mapped
from deepspeed.errors import DeepSpeedConfigError


@pytest.mark.parametrize(
    ("arguments", "made"),
    [
        (["--a", "--deepspeed_config", "x.json", "--b"], ["--a", "--deepspeed_config", "new.json", "--b"]),
        (["--deepspeed", "x.json"], ["--deepspeed", "new.json"]),
        (["--deepspeed_config=x.json"], ["--deepspeed_config=new.json"]),
        (["--deepspeed", "--deepspeed_config", "x.json"], ["--deepspeed", "--deepspeed_config", "new.json"]),
        (["--deepspeed"], ["--deepspeed"]),
        (["x.json"], ["x.json"]),
    ],
)
def test_the_file_of_the_configuration_is_replaced(arguments, made):
    assert with_config(arguments, Path("new.json")) == made


def test_a_script_without_a_file_has_none():
    assert find_config(["--epochs", "3"]) is None


def test_mapped_arguments_carry_values():
    mappings = {
        "train_micro_batch_size_per_gpu": "--batch ",
        "gradient_accumulation_steps ": "--steps",
        "fp16.enabled": "-h",
    }
    changes = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    assert with_mapped(["--batch", "1", "-x"], mappings, changes) == ["--batch", "4", "-x", "--steps", "2"]
    assert with_mapped(["--batch=1", "--steps", "9"], mappings, changes) == ["--batch=4", "--steps", "2"]
    with pytest.raises(DeepSpeedConfigError, match="arg_mappings.* expected an option of the script"):
        with_mapped([], {"train_batch_size": "batch"}, changes)
