"""What a save replaces and removes in the folder of checkpoints (``checkpoint.commit``)."""

import os
import time
from pathlib import Path

import pytest
import torch

from deepspeed.checkpoint.commit import SaveFolder, clean
from deepspeed.checkpoint.directory import find, tags
from deepspeed.checkpoint.format import Manifest
from deepspeed.checkpoint.weights_file import TensorEntry, WeightsWriter
from deepspeed.errors import CheckpointError


def save(root: Path, tag: str) -> None:
    folder = SaveFolder(root, tag, f"token-{tag}")
    folder.create()
    folder.write_manifest(Manifest((), (), {"tag": tag}))
    folder.commit()


def saved_as(root: Path, tag: str) -> object:
    found = find(root, tag)
    assert found is not None
    return Manifest.read(found.folder).facts["tag"]


def test_a_save_leaves_the_file_of_an_export_that_runs_in_its_folder(tmp_path: Path) -> None:
    entry = TensorEntry("weight", torch.float32, (4,))
    writer = WeightsWriter(tmp_path, "model.safetensors", [entry], None)
    for name in ("latest", "old.bin"):
        (tmp_path / f".saving-{name}").write_text("of a killed process")
    long_ago = time.time() - 48 * 3600
    os.utime(tmp_path / ".saving-old.bin", (long_ago, long_ago))
    clean(tmp_path)
    writer.add(entry, iter([torch.arange(4.0)]))
    assert writer.finish() == os.listdir(tmp_path) == ["model.safetensors"]


@pytest.mark.parametrize("target", ["other", "gone"])
def test_a_tag_that_is_a_link_becomes_a_folder(target: str, tmp_path: Path) -> None:
    save(tmp_path, "other")
    (tmp_path / "other" / "notes.txt").write_text("mine")
    (tmp_path / "best").symlink_to(target)
    save(tmp_path, "best")
    save(tmp_path, "third")
    assert saved_as(tmp_path, "best") == "best" and saved_as(tmp_path, "other") == "other"
    assert (tmp_path / "other" / "notes.txt").read_text() == "mine"
    assert sorted(tags(tmp_path)) == sorted(os.listdir(tmp_path)) == ["best", "other", "third"]


def test_an_interrupted_save_of_a_link_is_completed(tmp_path: Path) -> None:
    save(tmp_path, "other")
    (tmp_path / ".replaced-best").symlink_to("other")
    save(tmp_path, "third")
    assert saved_as(tmp_path, "best") == "other"
    assert sorted(os.listdir(tmp_path)) == ["best", "other", "third"]


def test_a_file_with_the_name_of_the_tag_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("mine")
    with pytest.raises(CheckpointError, match="found a file; save under another tag"):
        save(tmp_path, "model")
    assert (tmp_path / "model").read_text() == "mine" and os.listdir(tmp_path) == ["model"]
