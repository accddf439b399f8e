"""Every node keeps what its ranks need: the same checkpoint, in folders that the others cannot see."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from deepspeed import comm
from deepspeed.checkpoint.format import Manifest
from deepspeed.errors import CheckpointError
from tests.checkpoint.training import engine, fragments, joined, train
from tests.harness import assert_states_equal, run_ranks

SETTINGS = {"checkpoint": {"use_node_local_storage": True}}


def on_nodes(folder: str):
    """Each rank is the first of a node of its own."""
    mine = Path(folder) / f"node{comm.get_rank()}"
    os.environ["LOCAL_RANK"] = "0"
    run = engine(3, "bf16", **SETTINGS)
    train(run, range(2))
    run.save_checkpoint(mine, client_state={"note": "of rank 0" if comm.get_rank() == 0 else "of another"})
    expected = fragments(run)
    again = engine(3, "bf16", seed=8, **SETTINGS)
    path, client_state = again.load_checkpoint(mine)
    assert_states_equal(fragments(again), expected)
    assert client_state["note"] == "of rank 0"
    comm.barrier()
    other = Path(folder) / f"node{1 - comm.get_rank()}"
    different = engine(2, "bf16", seed=8, **SETTINGS)
    with pytest.raises(CheckpointError, match=rf"found none of rank {comm.get_rank()} .*saved into 2 folders"):
        different.load_checkpoint(other)
    return path, sorted(os.listdir(mine / "global_step2")), sorted(os.listdir(mine))


def test_each_node_has_what_it_needs(tmp_path):
    results = run_ranks(on_nodes, 2, str(tmp_path))
    for rank, (path, files, beside) in enumerate(results):
        assert path == str(tmp_path / f"node{rank}" / "global_step2")
        assert f"rank{rank:05d}-master.safetensors" in files
        assert f"rank{1 - rank:05d}-master.safetensors" not in files
        assert {"manifest.json", "rank00000-training.pt", "rank00000-buffers.safetensors"} <= set(files)
        assert beside == ["global_step2", "latest", "zero_to_fp32.py"]


def apart(folder: str, background: bool) -> Any:
    """Rank 0 has a folder of its own, and the others share one."""
    run = engine(2, "bf16", checkpoint={"async_save": background})
    train(run, range(2))
    mine = Path(folder) / f"folder{min(comm.get_rank(), 1)}"
    for tag in ("one", "two"):
        run.save_checkpoint(mine, tag=tag, client_state={"note": tag})
    run.wait_for_checkpoint()
    expected = fragments(run)
    again = engine(2, "bf16", seed=8)
    again.load_checkpoint(mine)
    assert_states_equal(fragments(again), expected)
    return expected


def of_the_union(folder: str, stage: int) -> Any:
    again = engine(stage, "bf16", seed=8)
    assert again.load_checkpoint(folder)[1]["note"] == "two"
    return fragments(again)


def without_a_folder(folder: str) -> str:
    with pytest.raises(CheckpointError) as error:
        engine(2, "bf16", seed=8).load_checkpoint(folder)
    return str(error.value)


@pytest.mark.parametrize("background", [False, True])
def test_a_folder_for_each_rank_and_all_of_them_in_one(background, tmp_path):
    saved = joined(run_ranks(apart, 3, str(tmp_path), background))
    text = run_ranks(without_a_folder, 1, str(tmp_path / "folder0"))[0]
    assert f"{tmp_path / 'folder0' / 'two'}: expected the files" in text and "none of ranks 1, 2 " in text
    first, second = (tmp_path / name for name in ("folder0", "folder1"))
    common = {path.relative_to(first) for path in first.rglob("*") if path.is_file()} & {
        path.relative_to(second) for path in second.rglob("*") if path.is_file()
    }
    assert {str(path.parent) for path in common} == {".", "one", "two"}
    assert all((first / path).read_bytes() == (second / path).read_bytes() for path in common)  # in any order
    shutil.copytree(second, first, dirs_exist_ok=True)
    for ranks, stage in ((1, 0), (2, 3)):
        found = joined(run_ranks(of_the_union, ranks, str(first), stage))
        assert_states_equal(
            {key: found[key] for key in saved if "master" in key},
            {key: value for key, value in saved.items() if "master" in key},
        )


def same_folder_by_other_names(folder: str) -> list[str]:
    """A link is another path to one folder: nothing is apart."""
    mine = Path(folder) / f"by{comm.get_rank()}"
    run = engine(1, "fp32")
    train(run, range(1))
    run.save_checkpoint(mine, tag="one")
    return sorted(path.name for path in (mine / "one").iterdir())


def test_links_to_one_folder_are_one_folder(tmp_path):
    (tmp_path / "by0").mkdir()
    (tmp_path / "by1").symlink_to(tmp_path / "by0")
    first, second = run_ranks(same_folder_by_other_names, 2, str(tmp_path))
    assert first == second and not any(name.startswith(".") for name in first)
    assert "folders" not in Manifest.read(tmp_path / "by0" / "one").facts


def unwritable(folder: str) -> str:
    mine = Path(folder) / f"folder{comm.get_rank()}"
    if comm.get_rank() == 1:
        mine.write_text("a file")
    run = engine(1, "fp32")
    with pytest.raises(CheckpointError) as error:
        run.save_checkpoint(mine, tag="one")
    return str(error.value)


def test_a_failure_in_one_folder_leaves_nothing_in_the_others(tmp_path):
    texts = run_ranks(unwritable, 2, str(tmp_path))
    assert all("failed on rank 1" in text and "folder1" in text for text in texts)
    assert list((tmp_path / "folder0").iterdir()) == []
