"""``python -m deepspeed.config``, and what importing the package brings along."""

import ast
import json
from pathlib import Path

import pytest

import deepspeed.config
from deepspeed.config.__main__ import main
from tests.config.test_integrations import CLUSTER_PAGE


def write(folder: Path, config: object) -> str:
    file = folder / "ds_config.json"
    file.write_text(json.dumps(config, indent=1))
    return str(file)


def test_a_file_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", write(tmp_path, CLUSTER_PAGE), "--world-size", "4"]) == 0
    text = capsys.readouterr().out
    assert "is in order" in text and "16 = micro-batch 4 x accumulation 1 x 4 ranks" in text


def test_notices_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", write(tmp_path, {**CLUSTER_PAGE, "disable_allgather": True})]) == 0
    assert "disable_allgather (line" in capsys.readouterr().out


def test_problems_are_listed_and_the_exit_code_is_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = {**CLUSTER_PAGE, "fp16": {"enabld": True}, "zero_optimization": {"stage": 7}}
    assert main(["check", write(tmp_path, wrong), "--world-size", "3"]) == 1
    text = capsys.readouterr().out
    assert "3 problems" in text and "train_batch_size" in text
    assert "fp16.enabld (line " in text and 'did you mean "fp16.enabled"?' in text


def test_markup_in_a_file_is_shown_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", write(tmp_path, {"train_batch_size": 1, "[red]": 1})]) == 0
    assert "[red]" in capsys.readouterr().out


def test_a_missing_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "nowhere.json"]) == 1
    assert "there is no file nowhere.json" in capsys.readouterr().out


def test_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(tmp_path)]) == 1
    assert "is a folder; give a file" in capsys.readouterr().out


REMOVED = {
    "train_batch_size": 8,
    "optimizer": {"type": "OneBitAdam", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": 1, "overlap_comm": True, "legacy_stage1": True},
    "elasticity": {"enabled": False},
    "sparse_attention": {"mode": "fixed", "block": 16},
    "graph_harvesting": True,
    "amp": {"enabled": False},
}


def test_keys_that_the_original_has_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", write(tmp_path, REMOVED)]) == 0
    lines = [line.strip(" -") for line in capsys.readouterr().out.splitlines() if "works here" in line]
    assert lines == [
        f"{key}: removed in 0.19.8, works here" for key in ("optimizer.type", "elasticity", "sparse_attention")
    ]


def test_each_key_beside_the_original(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--from-upstream", write(tmp_path, {**REMOVED, "fp17": 1, "nebula": {"enabled": True}})]) == 0
    lines = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert lines["train_batch_size"] == lines["optimizer.params.lr"] == lines["zero_optimization.stage"] == "same"
    assert lines["elasticity.enabled"] == lines["sparse_attention.block"] == "removed in 0.19.8, works here"
    assert lines["zero_optimization.overlap_comm"].startswith("same, with another default: true at stage 3 only there")
    assert lines["zero_optimization.legacy_stage1"].startswith("removed in 0.5.9, no effect here: ")
    assert lines["graph_harvesting"].startswith("removed in 0.19.8, no effect here: ")
    assert lines["amp.enabled"].startswith("removed in 0.19.8, does not exist here: ")
    assert lines["nebula.enabled"].startswith("refused here: ") and "save_checkpoint" in lines["nebula.enabled"]
    assert lines["fp17"].startswith("refused here: unknown key")


def test_schema_and_reference_go_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "ds_config"
    assert main(["reference"]) == 0
    assert capsys.readouterr().out.startswith("# Configuration reference")


def test_the_package_needs_no_torch() -> None:
    """Names of dtypes are text here, so that a file can be checked on a machine without torch."""
    folder = Path(deepspeed.config.__file__).parent
    files = [*sorted(folder.rglob("*.py")), folder.parent / "axes.py"]
    assert len(files) > 30
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.split(".")[0] == "torch"], file
            mine = [name for name in names if name.startswith("deepspeed")]
            allowed = ("axes", "command_output", "config", "errors", "missing_features", "logging")
            assert all(name.split(".")[1] in allowed for name in mine), file
