"""Every node keeps what its ranks need: the same checkpoint, in folders that the others cannot see."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from deepspeed import comm
from deepspeed.errors import CheckpointError
from tests.checkpoint.training import engine, fragments, train
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
    with pytest.raises(CheckpointError, match="missing"):
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
