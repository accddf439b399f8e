"""Checkpoint engines: state dicts by path, torch's and a program's own."""

import collections
import os
from pathlib import Path

import pytest
import torch

from deepspeed import comm
from deepspeed.checkpoint.consolidate import open_source
from deepspeed.checkpoint.ds_to_universal import convert_folder
from deepspeed.errors import CheckpointError, DeepSpeedConfigError
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.checkpoint_engine import CheckpointEngine, TorchCheckpointEngine
from tests.checkpoint.training import engine as make_engine
from tests.checkpoint.training import fragments, joined, other_state, train
from tests.harness import assert_states_equal, on_ranks, run_ranks


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


@on_ranks(1)
def test_a_pipeline_writes_its_layers_through_one(tmp_path) -> None:
    folder = str(tmp_path)

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


class Elsewhere(CheckpointEngine):
    """Keeps state dicts below another folder, and notes the calls."""

    def __init__(self, store, commits=True):
        super().__init__()
        self.store, self.commits, self.calls = Path(store), commits, []

    def _place(self, path):
        return self.store / path.replace(os.sep, "+")

    def create(self, info):
        self.calls.append(f"create {info}")

    def save(self, state_dict, path):
        assert all(isinstance(value, torch.Tensor) and value.device.type == "cpu" for value in state_dict.values())
        self.calls.append(f"save {Path(path).name}")
        torch.save(state_dict, self._place(path))

    def load(self, path, map_location=None):
        return torch.load(self._place(path), map_location=map_location, weights_only=True)

    def commit(self, info):
        self.calls.append(f"commit {info.tag} {info.save_latest}")
        return self.commits

    def cleanup(self):
        self.calls.append("cleanup")


def _through_ones_own(folder, store, stage, in_background):
    run = make_engine(stage, "bf16")
    assert isinstance(run.checkpoint_engine, TorchCheckpointEngine)
    own = run.checkpoint_engine = Elsewhere(store)
    train(run, range(3))
    saved = fragments(run), other_state(run)
    run.save_checkpoint(folder, tag="one", client_state={"note": "hello"}, async_save=in_background)
    losses = train(run, range(3, 5))
    run.wait_for_checkpoint()
    assert own.calls[0] == "create one" and own.calls[-1] == "commit one True"
    assert any(call.startswith("save rank") and "master" in call for call in own.calls)
    again = make_engine(stage, "bf16", seed=8)
    again.checkpoint_engine = Elsewhere(store)
    path, client = again.load_checkpoint(folder)
    assert path == os.path.join(folder, "one") and client["note"] == "hello"
    loaded = fragments(again), other_state(again)
    assert train(again, range(3, 5)) == losses
    with pytest.raises(CheckpointError, match=r"one is a checkpoint already.*Save under another tag"):
        again.save_checkpoint(folder, tag="one")
    again.checkpoint_engine = Elsewhere(store, commits=comm.get_rank() == 0)
    with pytest.raises(CheckpointError, match=r"rank 1: Elsewhere\.commit\('two'\) returned False"):
        again.save_checkpoint(folder, tag="two")
    again.checkpoint_engine = None
    with pytest.raises(CheckpointError, match=r"stored by the checkpoint engine 'Elsewhere'.*checkpoint_engine = "):
        again.load_checkpoint(folder, tag="one")
    run.destroy()
    assert own.calls[-1] == "cleanup"
    return saved, loaded


@pytest.mark.parametrize(("stage", "in_background"), [(0, False), (3, True)])
def test_checkpoints_go_through_ones_own(stage, in_background, tmp_path):
    store, folder = tmp_path / "store", tmp_path / "folder"
    store.mkdir()
    results = run_ranks(_through_ones_own, 2, str(folder), str(store), stage, in_background)
    for (_, state), (_, found) in results:
        assert_states_equal(found, state)
    assert_states_equal(joined([loaded[0] for _, loaded in results]), joined([saved[0] for saved, _ in results]))
    assert (folder / "latest").read_text() == "one"
    assert not [path for path in (folder / "one").iterdir() if path.suffix == ".safetensors"]
    with pytest.raises(CheckpointError, match="stored by the checkpoint engine 'Elsewhere', expected files"):
        open_source(folder)


class InTheFolder(Elsewhere):
    def _place(self, path):
        return Path(path)


def _converted(folder, kind):
    run = make_engine(2, "fp32")
    run.checkpoint_engine = kind(folder)
    train(run, range(1))
    run.save_checkpoint(folder, tag="one")
    saved = fragments(run)
    convert_folder(Path(folder, "one"), Path(folder, "two"), "native")
    train(run, range(1))
    run.load_checkpoint(folder, tag="two")
    return saved, fragments(run)


def test_the_command_links_the_files_of_ones_own(tmp_path):
    ((saved, loaded),) = run_ranks(_converted, 1, str(tmp_path), InTheFolder)
    assert_states_equal(loaded, saved)
    with pytest.raises(Exception, match=r"stored by the checkpoint engine 'Elsewhere', expected rank00000-\w+\.pt"):
        run_ranks(_converted, 1, str(tmp_path / "elsewhere"), Elsewhere)


def _another_topology(folder, store, write):
    run = make_engine(2 if write else 3, "fp32", seed=1 if write else 5)
    run.checkpoint_engine = Elsewhere(store)
    if write:
        train(run, range(2))
        run.save_checkpoint(folder)
    else:
        run.load_checkpoint(folder)
    return fragments(run)


def test_any_number_of_ranks_loads_it_and_what_was_altered_is_named(tmp_path):
    store, folder = tmp_path / "store", tmp_path / "folder"
    store.mkdir()
    written = run_ranks(_another_topology, 2, str(folder), str(store), True)
    loaded = run_ranks(_another_topology, 1, str(folder), str(store), False)
    assert_states_equal(joined(loaded), joined(written))
    path = next(path for path in store.iterdir() if "rank00001-master" in path.name)
    state = torch.load(path)
    name, values = next(iter(state.items()))
    for changed, message in (
        ({name: values + 1}, "checksum mismatch"),
        (
            {name: values[1:]},
            r"Elsewhere\.load\(.*rank00001-master.*expected '\d+:\d+' with \d+ bytes",
        ),
        ({}, r"expected '\d+:\d+' with .* found nothing"),
    ):
        torch.save({**{key: value for key, value in state.items() if key != name}, **changed}, path)
        with pytest.raises(Exception, match=message):
            run_ranks(_another_topology, 1, str(folder), str(store), False)


@on_ranks(1)
def test_what_is_no_checkpoint_engine_is_refused() -> None:
    run = make_engine(0, "fp32", checkpoint={"keep_last": 2})
    with pytest.raises(DeepSpeedConfigError, match=r"derived from CheckpointEngine, found dict"):
        run.checkpoint_engine = {}
    with pytest.raises(DeepSpeedConfigError, match=r"checkpoint\.keep_last=2: expected null"):
        run.checkpoint_engine = InMemory()
