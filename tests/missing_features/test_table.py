"""Names of missing features can be imported; using one raises one sentence."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

from deepspeed.errors import NotYetSupportedError
from deepspeed.missing_features import FEATURES, is_missing, unavailable
from deepspeed.missing_features.__main__ import main, page

ROOT = Path(__file__).resolve().parents[2]
NAMES = [name for feature in FEATURES for name in feature.full_names()]


def test_names_import_and_raise_one_sentence_when_called():
    for full_name in NAMES:
        module, _, name = full_name.rpartition(".")
        placeholder = getattr(importlib.import_module(module), name)
        assert placeholder is unavailable(full_name), f"{full_name} has arrived: take it out of the table"
        with pytest.raises(NotYetSupportedError) as caught:
            placeholder("anything", at="all")
        sentence = str(caught.value)
        assert sentence.startswith(f"{full_name}: ") and "is not supported yet. " in sentence and sentence.endswith(".")


def test_no_name_twice():
    assert len(NAMES) == len(set(NAMES))


def test_classes():
    from deepspeed import DeepSpeedTransformerLayer

    assert isinstance(DeepSpeedTransformerLayer, type)
    assert not isinstance(nn.Linear(1, 1), DeepSpeedTransformerLayer)
    assert not issubclass(nn.Linear, DeepSpeedTransformerLayer)
    with pytest.raises(NotYetSupportedError, match="fused transformer layer"):

        class Mine(DeepSpeedTransformerLayer):
            pass

    with pytest.raises(NotYetSupportedError, match="fused transformer layer"):

        class Both(nn.Module, DeepSpeedTransformerLayer):
            pass

    assert repr(DeepSpeedTransformerLayer) == "<deepspeed.DeepSpeedTransformerLayer: not supported yet>"


def test_attributes_of_classes():
    from deepspeed.inference import InferenceEngineV2

    with pytest.raises(NotYetSupportedError, match="second inference engine"):
        InferenceEngineV2.no_such_name(sequence_parallel_size=2)
    assert not hasattr(InferenceEngineV2, "no_such_name")


def test_functions_look_like_functions():
    from deepspeed.module_inject import replace_transformer_layer as missing

    assert missing.__name__ == "replace_transformer_layer" and missing.__module__ == "deepspeed.module_inject"
    assert "fused layers" in missing.__doc__


def test_present_names_are_not_missing():
    assert not is_missing("deepspeed.initialize")
    assert is_missing("deepspeed.module_inject.replace_transformer_layer")
    with pytest.raises(KeyError):
        unavailable("deepspeed.initialize")


def test_moe_queries_return_values():
    from deepspeed.moe.utils import has_moe_layers, is_moe_param, is_moe_param_group

    layer = nn.Linear(2, 2)
    assert has_moe_layers(layer) == (False, 0)
    assert not is_moe_param(layer.weight)
    layer.weight.allreduce = False
    assert is_moe_param(layer.weight)
    assert is_moe_param_group({"moe": True}) and not is_moe_param_group({"lr": 1})


def test_page_is_in_step():
    path = ROOT / "docs" / "reference" / "missing-features.md"
    assert path.read_text(encoding="utf-8") == page(), "run: python -m deepspeed.missing_features " + str(
        path.relative_to(ROOT)
    )


def test_page_names_everything():
    text = page()
    for full_name in NAMES:
        module, _, name = full_name.rpartition(".")
        assert any(f"`{module}`" in line and f"`{name}`" in line for line in text.splitlines())


def test_command_writes_the_page(tmp_path):
    target = tmp_path / "page.md"
    main([str(target)])
    command = [sys.executable, "-W", "error", "-m", "deepspeed.missing_features"]
    shown = subprocess.run(command, check=True, timeout=60, capture_output=True, text=True)
    assert target.read_text(encoding="utf-8") == shown.stdout == page()
