"""Checkpoint engines: state dicts by path, torch's and a program's own."""

from __future__ import annotations

import collections
import os

import pytest
import torch

from deepspeed.errors import CheckpointError
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.checkpoint_engine import CheckpointEngine, TorchCheckpointEngine
from tests.harness import run_ranks


class Evil:
    def __reduce__(self):
        return os.getcwd, ()


def test_files_of_torch(tmp_path):
    engine = TorchCheckpointEngine()
    engine.makedirs(tmp_path / "a" / "b")
    with pytest.raises(FileExistsError):
        engine.makedirs(tmp_path / "a" / "b")
    path = tmp_path / "a" / "b" / "state.pt"
    state = collections.OrderedDict(weight=torch.arange(3.0), nested={"list": [torch.ones(2).char()], "n": 3})
    engine.create("tag")
    engine.save({"old": 1}, path)
    engine.save(state, str(path))
    assert engine.commit("tag") is True and not engine.is_decoupled()
    for found in (engine.load(path), engine.load(path, map_location="cpu"), torch.load(path, weights_only=True)):
        assert torch.equal(found["weight"], state["weight"]) and found["nested"]["n"] == 3
        assert torch.equal(found["nested"]["list"][0], state["nested"]["list"][0])
    assert engine.load(path, map_location="meta")["nested"]["list"][0].is_meta
    assert os.listdir(path.parent) == ["state.pt"]
    torch.save({"evil": Evil()}, path)
    with pytest.raises(CheckpointError, match=r"state\.pt: refused by the restricted loader"):
        engine.load(path)


class InMemory(CheckpointEngine):
    def __init__(self):
        super().__init__()
        self.files = {}

    def save(self, state_dict, path):
        self.files[str(path)] = {name: value.clone() for name, value in state_dict.items()}

    def load(self, path, map_location=None):
        return self.files[str(path)]


def _layers_in_files(folder):
    def built(seed):
        torch.manual_seed(seed)
        return PipelineModule([LayerSpec(torch.nn.Linear, 3, 3) for _ in range(2)], num_stages=1)

    saved, loaded = built(0), built(1)
    for engine in (TorchCheckpointEngine(), InMemory()):
        saved.save_state_dict(folder, engine)
        if isinstance(engine, TorchCheckpointEngine):
            loaded.load_state_dir(folder, engine)
            for name, value in saved.state_dict().items():
                assert torch.equal(loaded.state_dict()[name], value)
        else:
            assert len(engine.files) == 2
    with pytest.raises(NotImplementedError, match=r"CheckpointEngine\.save: derive it"):
        CheckpointEngine().save({}, folder)


def test_a_pipeline_writes_its_layers_through_one(tmp_path):
    run_ranks(_layers_in_files, 1, str(tmp_path))
