"""Full weights for other programs: from a running engine and, without one, from its checkpoint."""

import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from deepspeed import comm
from deepspeed.checkpoint import consolidate, reader
from deepspeed.checkpoint.save import CARRIED
from deepspeed.checkpoint.weights_file import TensorEntry, WeightsWriter
from deepspeed.errors import CheckpointError
from deepspeed.utils import zero_to_fp32
from tests.checkpoint.training import Net, engine, fragments, joined, train
from tests.engine.support import engine_of
from tests.harness import assert_states_equal, on_ranks, run_ranks

GATHER = {"zero_optimization": {"stage3_gather_16bit_weights_on_model_save": True}}
FROZEN = [name for name, parameter in Net().named_parameters() if not parameter.requires_grad]
NAMES = list(Net().state_dict())
BUFFERS = {name for name, _ in Net().named_buffers()}


def save(folder: str, stage: int, precision: str):
    run = engine(stage, precision)
    train(run, range(2))
    run.save_checkpoint(folder, client_state={"note": "kept"})
    comm.barrier()
    return fragments(run), run.module.seen.clone(), run.module.mean.clone()


def saved(folder: Path, stage: int = 3, precision: str = "bf16") -> dict[str, torch.Tensor]:
    """A checkpoint of two ranks, and the full fp32 state dict it stands for."""
    results = run_ranks(save, 2, str(folder), stage, precision)
    values = joined([result[0] for result in results])
    shapes = {name: tensor.shape for name, tensor in Net().state_dict().items()}
    expected = {}
    for name, shape in shapes.items():
        source = "embed.weight" if name == "head.weight" else name
        flat = values.get(f"master/{source}", values.get(f"compute/{source}"))
        if shape.numel() == 0:
            flat = torch.zeros(0)
        if flat is not None:
            expected[name] = flat.float().view(shape)
    expected["seen"], expected["mean"] = results[0][1], results[0][2].float()
    return {name: expected[name] for name in NAMES}


@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (1, "fp16"), (2, "bf16"), (3, "bf16")])
def test_functions_give_the_full_state_dict(stage, precision, tmp_path):
    expected = saved(tmp_path, stage, precision)
    state = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))
    assert_states_equal(dict(state), expected)
    assert state["head.weight"] is state["embed.weight"]
    storages = {id(t): t.untyped_storage().data_ptr() for t in state.values() if t.numel()}
    assert len(set(storages.values())) == len(storages)
    lazy = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path, "global_step2", lazy_mode=True)
    assert not any(isinstance(value, torch.Tensor) for value in lazy.values())
    assert_states_equal(zero_to_fp32.to_torch_tensor(lazy), expected)
    assert zero_to_fp32.to_torch_tensor(lazy, return_empty_tensor=True)["mean"].shape == (9,)
    few = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path, exclude_frozen_parameters=True)
    assert set(NAMES) - set(few) == set(FROZEN)
    model = zero_to_fp32.load_state_dict_from_zero_checkpoint(Net(), tmp_path)
    assert_states_equal(dict(model.state_dict()), expected)


def test_files_that_the_ecosystem_looks_up(tmp_path):
    for stage, precision in ((0, "fp32"), (2, "bf16"), (3, "fp16")):
        run_ranks(save, 2, str(tmp_path / str(stage)), stage, precision)
        folder = tmp_path / str(stage) / "global_step2"
        state = torch.load(zero_to_fp32.get_model_state_file(folder, stage), weights_only=True)
        assert state["note"] == "kept" and state["global_steps"] == 2 and state["dp_world_size"] == 2
        assert zero_to_fp32.get_model_state_files(folder) == [zero_to_fp32.get_model_state_file(folder, stage)]
        if stage:
            (path,) = zero_to_fp32.get_optim_files(folder)
            assert os.path.basename(path).startswith("bf16_") == (precision == "bf16")
            assert torch.load(path, weights_only=True) == {"optimizer_state_dict": {"zero_stage": stage}}
        else:
            with pytest.raises(FileNotFoundError):
                zero_to_fp32.get_optim_files(folder)


WITHOUT_PACKAGE = """
import runpy, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("deepspeed", "pydantic", "rich", "hjson", "psutil"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Blocked())
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


def run_script(folder: Path, *arguments: str, with_package: bool, cwd: Path) -> subprocess.CompletedProcess:
    script = str(folder / "zero_to_fp32.py")
    root = str(Path(__file__).resolve().parents[2])
    command = [sys.executable, script] if with_package else [sys.executable, "-c", WITHOUT_PACKAGE, script]
    environ = {**os.environ, "PYTHONPATH": root if with_package else "", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run([*command, *arguments], cwd=cwd, env=environ, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("with_package", [True, False])
def test_the_script_beside_the_checkpoint(with_package, tmp_path):
    folder = tmp_path / "checkpoints"
    expected = saved(folder)
    assert os.access(folder / "zero_to_fp32.py", os.X_OK)
    done = run_script(folder, ".", "full.bin", with_package=with_package, cwd=folder)
    assert done.returncode == 0, done.stderr
    state = torch.load(folder / "full.bin", weights_only=True)
    assert_states_equal({name: state[name] for name in NAMES}, expected)
    assert state["head.weight"].data_ptr() == state["embed.weight"].data_ptr()
    if with_package:  # the parts that the script carries are the package's own: the rest is the same code
        return
    done = run_script(folder, ".", "out/full.safetensors", with_package=with_package, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert_states_equal(load_file(folder / "out" / "full.safetensors"), expected)
    done = run_script(folder, ".", "nowhere", "-t", "global_step77", with_package=with_package, cwd=folder)
    assert done.returncode == 1 and "'global_step2'" in done.stderr and not (folder / "nowhere").exists()


def test_the_script_carries_what_its_parts_import():
    """Nothing but each other, torch and Python itself."""
    import ast

    from tests.project.graph import tree_of

    known = {*CARRIED, *(name.rpartition(".")[0] for name in CARRIED)}
    for module in CARRIED:
        for node in tree_of(module).body:
            names = []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            for name in names:
                top = name.split(".")[0]
                assert name in known or top == "torch" or top in sys.stdlib_module_names, (module, name)


@pytest.mark.parametrize("safe", [False, True])
def test_shards_with_an_index(safe, tmp_path):
    expected = saved(tmp_path)
    out = tmp_path / "out"
    stem, extension = ("model", ".safetensors") if safe else ("pytorch_model", ".bin")
    whole = zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(tmp_path, out, "5GB", safe)
    assert whole == [str(out / f"{stem}{extension}")]
    written = zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(tmp_path, out, "2KB", safe)
    count = len(written) - 1
    names = [f"{stem}-{n:05d}-of-{count:05d}{extension}" for n in range(1, count + 1)]
    assert sorted(os.listdir(out)) == sorted([*names, f"{stem}{extension}.index.json"])  # the whole file is gone
    index = json.loads((out / f"{stem}{extension}.index.json").read_text())
    state = {}
    for name in names:
        if safe:
            with safe_open(out / name, "pt") as file:
                assert file.metadata() == {"format": "pt"}
            part = load_file(out / name)
        else:
            part = torch.load(out / name, weights_only=True)
        assert all(index["weight_map"][key] == name for key in part)
        sizes = {t.untyped_storage().data_ptr(): t.nbytes for t in part.values()}
        assert sum(sizes.values()) <= 2000 or len(sizes) == 1
        state.update(part)
    assert_states_equal({name: state[name] for name in NAMES}, expected)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())


def test_a_damaged_checkpoint_gives_no_file(tmp_path):
    saved(tmp_path / "checkpoints")
    path = tmp_path / "checkpoints" / "global_step2" / "rank00001-master.safetensors"
    data = bytearray(path.read_bytes())
    data[-40] ^= 4
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="checksum"):
        zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "checkpoints", tmp_path / "out", "1KB", True)
    assert os.listdir(tmp_path / "out") == []


MEMORY = """
import resource, sys, torch
from pathlib import Path
from deepspeed.checkpoint.consolidate import convert_zero_checkpoint_to_fp32_state_dict
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
convert_zero_checkpoint_to_fp32_state_dict(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4] == "safe")
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.mark.parametrize(("kind", "shard"), [("safe", "5GB"), ("torch", "40MB")])
def test_memory_stays_within_two_tensors_or_a_shard(kind, shard, tmp_path):
    """40 tensors of 8 MB: 320 MB, with far less in memory at any time."""
    from deepspeed.checkpoint.directory import LATEST
    from deepspeed.checkpoint.format import MANIFEST, MASTER, Manifest
    from deepspeed.checkpoint.writer import BucketRun, FileWriter
    from deepspeed.zero.tiling.layout import bucket_layout
    from deepspeed.zero.tiling.tiles import Tile

    numel, count = 2 << 20, 40
    folder = tmp_path / "big"
    folder.mkdir()
    tiles = [Tile(f"layer{index}.weight", (numel // 64, 64), 0) for index in range(count)]
    layout = bucket_layout(0, tiles, dtype="bfloat16", trainable=True, num_slices=1)
    values = torch.ones(numel)
    with FileWriter(folder) as writer:
        record = writer.write_runs(
            "rank00000-master.safetensors", MASTER, [BucketRun(0, 0, layout.numel, (values,) * count, values.dtype)]
        )
    (folder / MANIFEST).write_bytes(Manifest((layout,), (record,), {"tag": "big"}).encode())
    (tmp_path / LATEST).write_text("big")
    command = [sys.executable, "-c", MEMORY, str(tmp_path), str(tmp_path / "out"), shard, kind]
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    allowed = 200 << 20 if kind == "safe" else (40 << 20) + (60 << 20)
    assert int(done.stdout) < allowed, f"{int(done.stdout) / 2**20:.0f} MiB"


def export_16bit(folder: str, stage: int):
    run = engine(stage, "bf16", **GATHER)
    train(run, range(2))
    state = run._consolidated_16bit_state_dict()
    few = run._consolidated_16bit_state_dict(exclude_frozen_parameters=True)
    if stage == 3:
        again = run._zero3_consolidated_16bit_state_dict()
        assert (again is None) == (comm.get_rank() > 0)
    else:
        with pytest.raises(ValueError, match="stage 3"):
            run._zero3_consolidated_16bit_state_dict()
    assert run.save_16bit_model(folder) is True
    assert run.save_16bit_model(Path(folder), "model.safetensors", exclude_frozen_parameters=True) is True
    assert run.save_16bit_model(Path(folder) / "shards", "model.safetensors", max_shard_size="1KB") is True
    assert run.save_fp16_model(folder, "old.bin") is True
    after = train(run, range(2, 3))  # nothing of this disturbs training
    return fragments(run), state, few, after


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_16bit_weights_of_a_running_engine(stage, tmp_path):
    first, second = run_ranks(export_16bit, 2, str(tmp_path), stage)
    assert second[1] is None and second[2] is None
    state = first[1]
    assert list(state) == NAMES
    model = Net()
    for name, tensor in state.items():
        expected = model.state_dict()[name].dtype if name in BUFFERS else torch.bfloat16
        assert tensor.dtype == expected and tensor.shape == model.state_dict()[name].shape
    assert state["head.weight"].data_ptr() == state["embed.weight"].data_ptr()
    pointers = [t.untyped_storage().data_ptr() for name, t in state.items() if t.numel() and name != "head.weight"]
    assert len(set(pointers)) == len(pointers)
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in state.values())
    assert set(state) - set(first[2]) == set(FROZEN)
    assert_states_equal(torch.load(tmp_path / "pytorch_model.bin", weights_only=True), state)
    assert_states_equal(torch.load(tmp_path / "old.bin", weights_only=True), state)
    assert_states_equal(load_file(tmp_path / "model.safetensors"), first[2])
    shards = list((tmp_path / "shards").glob("*.safetensors"))
    assert len(shards) > 3
    assert_states_equal({k: v for path in shards for k, v in load_file(path).items()}, state)


def without_the_setting(folder: str):
    run = engine(3, "bf16")
    return run.save_16bit_model(folder), os.path.exists(folder) and os.listdir(folder)


def test_stage_3_without_the_setting_writes_nothing(tmp_path):
    assert run_ranks(without_the_setting, 2, str(tmp_path / "out")) == [(False, False)] * 2


def unwritable(folder: str):
    run = engine(3, "bf16", **GATHER)
    with pytest.raises(CheckpointError) as raised:
        run.save_16bit_model(folder)
    train(run, range(1))
    return str(raised.value)


def test_weights_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    first, second = run_ranks(unwritable, 2, str(tmp_path / "file" / "below"))
    assert first == second and "rank 0" in first and "Not a directory" in first


def load_full(stage: int, state: dict):
    run = engine(stage, "bf16", seed=8)
    train(run, range(1))
    with pytest.raises(CheckpointError, match=r"a dict with the key 'module', .* found '.*'; a state dict is given as"):
        run.load_module_state_dict(state)
    with pytest.raises(CheckpointError, match="missing +gain"):
        run.load_module_state_dict({"module": {k: v for k, v in state.items() if k != "gain"}})
    run.load_module_state_dict(
        {"module": {k: v for k, v in state.items() if k != "gain"}}, allowed_missing_keys=["gain"]
    )
    run.load_module_state_dict({"module": state})
    held = fragments(run)

    def custom(src, dst):
        for name, parameter in dst.named_parameters():
            parameter.data.copy_(src[name] * 2)

    run.load_module_state_dict({"module": state}, custom_load_fn=custom)
    return held, fragments(run), run.module.seen.clone(), train(run, range(1, 2))


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_full_state_dict_is_loaded(stage):
    torch.manual_seed(5)
    state = dict(Net().state_dict())
    state["seen"] = torch.tensor(41)
    results = run_ranks(load_full, 2, stage, state)
    held, doubled = joined([r[0] for r in results]), joined([r[1] for r in results])
    for key, values in held.items():
        kind, name = key.split("/")
        if kind == "master":
            assert_states_equal(values, state[name].reshape(-1))
            assert_states_equal(doubled[key], (state[name] * 2).to(torch.bfloat16).float().reshape(-1))
        elif kind == "compute":
            assert_states_equal(values, state[name].to(torch.bfloat16).reshape(-1))
            assert_states_equal(doubled[key], (state[name] * 2).to(torch.bfloat16).reshape(-1))
    assert results[0][2].item() == 41


def write_a_part(_: object, path: Path) -> None:
    path.write_bytes(b"part")
    raise RuntimeError("file write failed")


@pytest.mark.parametrize("limit", [64, None], ids=["shards", "one file"])
@on_ranks(2)
def test_files_that_cannot_be_written_leave_nothing(tmp_path, limit: int | None) -> None:
    """Torch tells of a full disk by a RuntimeError; with shards in the middle, while the other ranks are gathering."""
    folder = str(tmp_path)
    run = engine(3, "bf16", **GATHER)
    with mock.patch("torch.save", write_a_part), pytest.raises(CheckpointError, match="file write failed"):
        run.save_16bit_model(folder, max_shard_size=limit)
    train(run, range(1))
    assert not os.listdir(folder)


def test_the_script_names_a_file_that_cannot_be_written(tmp_path, capsys):
    saved(tmp_path)
    with mock.patch("torch.save", write_a_part):
        assert consolidate.main([str(tmp_path), str(tmp_path / "out")]) == 1
    assert "pytorch_model.bin: torch cannot write it (file write failed)" in capsys.readouterr().err
    assert not os.listdir(tmp_path / "out")


def test_files_are_closed_when_the_tensors_are_read(tmp_path):
    saved(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))
    zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(str(tmp_path), tmp_path / "out")
    assert len(os.listdir("/proc/self/fd")) == before


def test_files_are_closed_where_the_interpreter_has_taken_modules_away(tmp_path):
    saved(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    lazy = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(tmp_path), lazy_mode=True)
    assert [lazy[name].contiguous().shape for name in lazy] == [lazy[name].shape for name in lazy]
    assert len(os.listdir("/proc/self/fd")) > before
    with mock.patch.object(reader, "os", None), mock.patch.object(sys, "unraisablehook") as hook:
        del lazy
        gc.collect()
    assert not hook.called and len(os.listdir("/proc/self/fd")) == before


class Stateful(torch.nn.Linear):
    def get_extra_state(self):
        return {"seen": 3}

    def set_extra_state(self, state):
        self.seen = state["seen"]


class Twice(torch.nn.Module):
    """One module under two names."""

    def __init__(self):
        super().__init__()
        self.one = Stateful(9, 9)
        self.two = self.one


@on_ranks(1)
def test_a_module_with_two_names_has_its_extra_state_under_both() -> None:
    state = engine_of(Twice(), 0)._consolidated_16bit_state_dict()
    assert state.keys() == Twice().state_dict().keys()
    Twice().load_state_dict(state)


def test_a_dtype_that_no_file_has_leaves_nothing(tmp_path):
    with pytest.raises(CheckpointError, match="complex128 cannot be saved"):
        WeightsWriter(tmp_path, "m.safetensors", [TensorEntry("a", torch.complex128, (4,))], None)
    assert not os.listdir(tmp_path)
