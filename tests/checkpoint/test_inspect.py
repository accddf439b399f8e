"""``ds_inspect`` shows what is in a checkpoint of either format, and whether it is whole."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from deepspeed.checkpoint import inspect
from tests.checkpoint.training import engine, train
from tests.harness import run_ranks

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = Path(__file__).resolve().parent / "fixtures"


def save(folder: str):
    run = engine(3, "bf16")
    for step in range(2):
        train(run, range(step, step + 1))
        run.save_checkpoint(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("inspected")
    run_ranks(save, 2, str(made))
    return made


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


def test_newest_checkpoint(folder, capsys):
    assert inspect.main([str(folder), "--verify", "--parameters"]) == 0
    shown = capsys.readouterr().out
    for text in (
        "global_step1, global_step2",
        "2 (0 skipped)",
        "2 rank(s), ZeRO stage 3",
        "bf16",
        "FusedAdam",
        "every byte verified",
        "optimizer.exp_avg_sq",
        "blocks.1.rise.weight",
        "(23, 9)",
        "head.weight = embed.weight",
        "frozen",
    ):
        assert text in shown, text


def test_one_tag_by_name_or_by_folder(folder, capsys):
    assert inspect.main([str(folder), "-t", "global_step1"]) == 0
    by_name = capsys.readouterr().out
    assert inspect.main([str(folder / "global_step1")]) == 0
    assert "global_step1" in capsys.readouterr().out and "1 (0 skipped)" in by_name
    assert "all files are there, sizes right" in by_name


@pytest.mark.parametrize(("arguments", "harm"), [([], os.unlink), (["--verify"], None)])
def test_damage_is_shown(arguments, harm, folder, tmp_path, capsys):
    for path in (folder / "global_step2").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    path = tmp_path / "rank00001-master.safetensors"
    if harm is None:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    else:
        harm(path)
    assert inspect.main([str(tmp_path), *arguments]) == 1
    shown = capsys.readouterr().out
    assert "damaged" in shown and path.name in shown


def test_nothing_there(tmp_path, capsys):
    assert inspect.main([str(tmp_path)]) == 1
    assert "no complete checkpoint" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["2-stage3-bf16", "2-stage2-universal"])
def test_the_original_format(name, tmp_path, capsys):
    with zipfile.ZipFile(FIXTURES / f"{name}.zip") as archive:
        archive.extractall(tmp_path)
    (tag,) = (path for path in tmp_path.iterdir() if path.is_dir() and path.name.startswith("tag"))
    assert inspect.main([str(tag), "-p"]) == 0
    shown = capsys.readouterr().out
    assert "upstream" in shown and "3 (0 skipped)" in shown and "master float32" in shown and "norm.bias" in shown


@pytest.mark.parametrize("module", [["deepspeed.checkpoint", "inspect"], ["deepspeed.cli.inspect_checkpoint"]])
def test_command_lines(module, folder):
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, "-m", *module, str(folder)], env=environ, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "ZeRO stage 3" in done.stdout and done.stderr == ""


def test_sizes_are_in_the_largest_unit_that_leaves_a_whole() -> None:
    sizes = [0, 999, 1000, 123_456, 999_000_000, 1_500_000_000_000]
    assert [inspect._bytes(size) for size in sizes] == ["0 B", "999 B", "1.0 KB", "123.5 KB", "999.0 MB", "1.50 TB"]
