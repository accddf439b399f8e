"""Files made to harm: nothing in them runs, nothing outside the folder is touched, nothing absurd is allocated."""

import argparse
import collections
import datetime
import hashlib
import io
import json
import os
import pickle
import tracemalloc
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed.checkpoint import names, restricted
from deepspeed.checkpoint.consolidate import open_source
from deepspeed.checkpoint.format import CHUNK_BYTES, MANIFEST, Manifest, SavedFile
from deepspeed.checkpoint.load import read_training_state
from deepspeed.checkpoint.reader import CheckpointReader
from deepspeed.errors import CheckpointError
from tests.checkpoint.training import engine, train
from tests.checkpoint.whole import read_whole
from tests.harness import run_ranks


def save(folder: str):
    run = engine(1, "fp32")
    train(run, range(1))
    run.save_checkpoint(folder, tag="tag")


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("original")
    run_ranks(save, 1, str(folder))
    return folder / "tag"


@pytest.fixture
def folder(original, tmp_path):
    for path in original.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def rewrite(folder: Path, change) -> None:
    """Changes the manifest and gives it a right digest, as an attacker would."""
    path = folder / MANIFEST
    body = json.loads(path.read_text())["manifest"]
    body = change(body) or body
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    path.write_text(f'{{"digest":"{hashlib.sha256(text.encode()).hexdigest()}","manifest":{text}}}')


def put_file(folder: Path, name: str, data: bytes) -> None:
    """Replaces a file and makes the manifest agree with it."""
    (folder / name).write_bytes(data)

    def change(body: dict) -> None:
        for entry in body["files"]:
            if entry["name"] == name:
                entry["size"] = len(data)
                entry["crc32"] = [
                    zlib.crc32(data[start : start + CHUNK_BYTES]) for start in range(0, len(data), CHUNK_BYTES)
                ]

    rewrite(folder, change)


class Harm:
    """Runs a command when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.target}",)


def torch_file(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def load_all(folder: Path, trust: bool = False) -> Any:
    with CheckpointReader(folder) as reader:
        state = read_training_state(reader, 0, trust=trust)
        for name in reader.parameters:
            read_whole(reader, name)
        for name in reader.buffers:
            reader.read_buffer(name)
        return state


def test_the_attack_of_these_tests_works(tmp_path):
    torch.load(io.BytesIO(torch_file({"a": Harm(tmp_path / "harmed")})), weights_only=False)
    assert (tmp_path / "harmed").exists()


@pytest.mark.parametrize(
    "name", ["mp_rank_00_model_states.pt", names.TRAINING_STATE, names.rank_state_file(0), names.OBJECTS]
)
def test_no_file_runs_code(name, folder):
    if name == names.OBJECTS:
        rewrite(folder, lambda body: body["files"].append({**body["files"][-1], "name": name, "pieces": []}))
    put_file(folder, name, torch_file({"world_size": 1, "a": Harm(folder / "harmed")}))
    with pytest.raises(CheckpointError, match=f"{name}.*refused by the restricted loader"):
        load_all(folder)
    put_file(folder, name, pickle.dumps(Harm(folder / "harmed")))
    with pytest.raises(CheckpointError, match="refused"):
        load_all(folder)
    assert not (folder / "harmed").exists()


def test_objects_set_apart_run_only_on_request(folder):
    rewrite(folder, lambda body: body["files"].append({**body["files"][-1], "name": names.OBJECTS, "pieces": []}))
    entry = (("odd",), torch_file(Harm(folder / "harmed")))
    put_file(folder, names.OBJECTS, torch_file({"client_state": [entry], "training": []}))
    assert load_all(folder).withheld == ["odd"]
    assert not (folder / "harmed").exists()
    load_all(folder, trust=True)
    assert (folder / "harmed").exists()


BAD_NAMES = ["../secret", "/etc/passwd", "a/b", "..", ".", "", "a\0b", "C:\\x", MANIFEST, "x" * 300, ".hidden"]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_names_that_lead_elsewhere_are_refused(name, folder):
    def change(body: dict) -> None:
        body["files"][0]["name"] = name

    rewrite(folder, change)
    with pytest.raises(CheckpointError):
        CheckpointReader(folder)


def test_a_file_that_is_no_plain_file(folder):
    name = "rank00000-master.safetensors"
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(CheckpointError, match="not a plain file"):
        load_all(folder)


def absurd(folder: Path, change) -> None:
    rewrite(folder, change)
    with pytest.raises(CheckpointError):
        load_all(folder)


def master(body: dict) -> dict:
    return next(entry for entry in body["files"] if entry["kind"] == "master")


def cut(body: dict, part: list) -> None:
    body["buckets"][0]["tiles"][0][4] = part


CHANGES = {
    "huge shape": lambda b: b["buckets"][0]["tiles"][0].__setitem__(1, [1 << 40, 1 << 40]),
    "shape beyond the bucket": lambda b: b["buckets"][0]["tiles"][0].__setitem__(1, [1 << 30]),
    "negative shape": lambda b: b["buckets"][0]["tiles"][0].__setitem__(1, [-1]),
    "shape of floats": lambda b: b["buckets"][0]["tiles"][0].__setitem__(1, [1.5]),
    "huge bucket": lambda b: b["buckets"][0].__setitem__("numel", 1 << 60),
    "bucket without pieces": lambda b: master(b).__setitem__("pieces", []),
    "piece beyond the file": lambda b: master(b)["pieces"][0].__setitem__(4, 1 << 40),
    "piece in the header": lambda b: master(b)["pieces"][0].__setitem__(4, 0),
    "piece of another bucket": lambda b: master(b)["pieces"][0].__setitem__(0, 10_000),
    "negative bucket": lambda b: master(b)["pieces"][0].__setitem__(0, -1),
    "piece backwards": lambda b: master(b)["pieces"][0].__setitem__(1, master(b)["pieces"][0][2] + 1),
    "piece twice": lambda b: master(b)["pieces"].append(master(b)["pieces"][0]),
    "unknown dtype": lambda b: master(b)["pieces"][0].__setitem__(3, "F1"),
    "file of another size": lambda b: master(b).__setitem__("size", 1 << 50),
    "few checksums": lambda b: master(b).__setitem__("crc32", []),
    "checksums of text": lambda b: master(b).__setitem__("crc32", ["0"] * len(master(b)["crc32"])),
    "name twice": lambda b: b["buckets"][0]["tiles"].append(b["buckets"][0]["tiles"][0]),
    "part of numbers": lambda b: cut(b, [1, 2, 3]),
    "boxes of another rank": lambda b: cut(b, ["w", [1, 2, 3, 4, 5], [[[0], [0], [1]]]]),
    "region outside": lambda b: cut(b, ["w", [4, 4], [[[9], [0], [1]]]]),
    "region before": lambda b: cut(b, ["w", [4, 4], [[[-1, 0], [0, 0], [1, 1]]]]),
    "boxes as text": lambda b: cut(b, ["w", [4, 4], "boxes"]),
    "most of a parameter is nowhere": lambda b: cut(b, ["w", [1 << 20], []]),
    "no part": lambda b: b["buckets"][0]["tiles"][0].pop(),
    "files as text": lambda b: b.__setitem__("files", "x"),
    "no facts": lambda b: b.pop("facts"),
    "later version": lambda b: b.__setitem__("version", 99),
    "other format": lambda b: b.__setitem__("format", "x"),
    "boolean as number": lambda b: b["buckets"][0].__setitem__("world_size", True),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_absurd_manifests_are_refused(change, folder):
    absurd(folder, lambda body: (change(body), None)[1])


@pytest.mark.parametrize("text", ["", "{", "[]", "1", "null", '{"manifest": 3}', "[" * 100_000, "\xff"])
def test_what_is_no_manifest(text, folder):
    (folder / MANIFEST).write_bytes(text.encode("latin1"))
    with pytest.raises(CheckpointError):
        CheckpointReader(folder)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_no_change_of_the_manifest_breaks_the_reader(data, original, tmp_path_factory):
    """Whatever stands in it: a checkpoint error, or nothing but what the files hold."""
    body = json.loads((original / MANIFEST).read_text())["manifest"]
    target: Any = body
    while True:
        keys = list(target) if isinstance(target, dict) else list(range(len(target)))
        key = data.draw(st.sampled_from(keys))
        if isinstance(target[key], (dict, list)) and target[key] and data.draw(st.booleans()):
            target = target[key]
            continue
        break
    target[key] = data.draw(
        st.one_of(st.integers(), st.floats(), st.text(max_size=5), st.none(), st.booleans(), st.just([]), st.just({}))
    )
    copy = tmp_path_factory.mktemp("changed")
    for path in original.iterdir():
        os.link(path, copy / path.name)
    (copy / MANIFEST).unlink()
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    (copy / MANIFEST).write_text(f'{{"digest":"{hashlib.sha256(text.encode()).hexdigest()}","manifest":{text}}}')
    try:
        load_all(copy)
    except CheckpointError:
        return


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_training_state_breaks_the_reader(data, original, tmp_path_factory):
    state = restricted.loads((original / names.TRAINING_STATE).read_bytes(), "original")
    key = data.draw(st.sampled_from(list(state)))
    if data.draw(st.booleans()):
        del state[key]
    else:
        state[key] = data.draw(
            st.one_of(st.integers(), st.text(max_size=3), st.just([1]), st.just({"a": 1}), st.none())
        )
    copy = tmp_path_factory.mktemp("changed")
    for path in original.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    put_file(copy, names.TRAINING_STATE, torch_file(state))
    try:
        load_all(copy)
    except CheckpointError:
        return


def test_a_zip_that_claims_to_be_large(folder):
    """A torch file whose directory lists more than there is."""
    buffer = io.BytesIO(torch_file({"x": torch.zeros(4)}))
    data = bytearray(buffer.getvalue())
    with zipfile.ZipFile(buffer) as archive:
        info = next(entry for entry in archive.infolist() if entry.filename.endswith("data/0"))
    position = data.rindex(info.filename.encode()) - 46
    data[position + 20 : position + 28] = (0x7FFFFFFF).to_bytes(4, "little") * 2
    with pytest.raises(CheckpointError):
        restricted.loads(bytes(data), "here")


def test_the_manifest_alone_decides_the_format(folder):
    """A native folder with upstream's file names, and without its manifest."""
    (folder / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match="manifest.json is missing"):
        open_source(folder)


def test_round_trip_of_a_manifest(original):
    manifest = Manifest.read(original)
    assert Manifest.decode(manifest.encode(), "here") == manifest
    assert all(isinstance(entry, SavedFile) for entry in manifest.files)


@pytest.mark.parametrize("name", ["../../outside", "{outside}", "a/../../../outside", "", ".."])
def test_a_parameter_name_that_leads_out_of_a_universal_checkpoint(tmp_path, name):
    outside, folder = tmp_path / "outside", tmp_path / "tag"
    (folder / "zero" / "a").mkdir(parents=True)
    outside.mkdir()
    torch.save({"param": torch.ones(2)}, outside / "fp32.pt")
    states = {"module": {}, "param_shapes": [{name.format(outside=outside): torch.Size([2])}], "buffer_names": []}
    torch.save(states, folder / "mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError, match="points outside of the folder"):
        open_source(folder)


def test_a_file_name_that_claims_countless_ranks(tmp_path):
    (tmp_path / "zero_pp_rank_99999999999_mp_rank_00_model_states.pt").touch()
    with pytest.raises(CheckpointError, match=r"rank\(s\) 0, 1, 2, 3, 4, 5, 6, 7, \.\.\. are missing"):
        open_source(tmp_path)


class Call:
    """Calls ``function(*arguments)`` when it is unpickled."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> Any:
        return self.function, self.arguments


MUCH = 10**8
DEEP: Any = "much"
for _ in range(40):  # as text it would have 2**40 times the length
    DEEP = (DEEP, DEEP)


@pytest.mark.parametrize(
    "much",
    [
        Call(bytes, MUCH),
        Call(bytearray, MUCH),
        Call(list, range(MUCH)),
        Call(tuple, range(MUCH)),
        Call(set, range(MUCH)),
        Call(frozenset, range(MUCH)),
        Call(bytes, range(MUCH)),
        Call(collections.deque, range(MUCH)),
        Call(collections.Counter, range(MUCH)),
        Call(str, DEEP),
        Call(numpy.ndarray, (MUCH,)),
        Call(numpy.void, MUCH),
        Call(numpy.bytes_, MUCH),
        Call(numpy.empty(0).__reduce__()[0], numpy.ndarray, (MUCH,), b"b"),
        Call(numpy.float64(0).__reduce__()[0], numpy.dtype("V100000000")),
        Call(torch.Tensor, MUCH),
        Call(torch.storage.UntypedStorage, MUCH),
        Call(torch._tensor._rebuild_from_type_v2, bytes, torch.Tensor, (MUCH,), None),
    ],
    ids=lambda much: f"{much.function.__name__}",
)
def test_small_files_do_not_expand_to_large_ones(much):
    data = torch_file({"a": much})
    assert len(data) < 3_000
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match="called with|that no function of torch"):
            restricted.loads(data, "file")
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()


def test_a_compressed_archive_is_refused(tmp_path):
    plain = io.BytesIO(torch_file({"a": "b" * 1_000_000}))
    packed = io.BytesIO()
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target:
        for entry in source.infolist():
            target.writestr(entry.filename, source.read(entry))
    assert len(packed.getvalue()) < 10_000
    with pytest.raises(CheckpointError, match="they are compressed"):
        restricted.loads(packed.getvalue(), "file")


def test_output_of_picklers_is_accepted():
    """Types stay types: a factory of a defaultdict is the type itself."""
    value = {
        "bytes": [b"", b"abc", bytearray(b"ab"), bytearray()],
        "sets": [{1, 2}, set(), frozenset({3})],
        "lazy": [range(MUCH), slice(1, None), 2j],
        "types": [list, bytes, int, numpy.float32],
        "containers": [collections.deque([1], 5), collections.Counter("aab"), collections.OrderedDict(a=1)],
        "default": collections.defaultdict(list, a=[1]),
        "numpy": [numpy.float32(2), numpy.arange(3), numpy.datetime64("2020"), numpy.array(["a"]), numpy.void(b"ab")],
        "tensors": [torch.arange(3), torch.nn.Parameter(torch.ones(2)), torch.Size([2])],
        "others": [argparse.Namespace(a=1), Path("/a"), datetime.timedelta(1), torch.float16, torch.device("cpu")],
    }
    kept, refused = restricted.split(value)
    assert refused == {} and kept is value
    loaded = restricted.loads(restricted.dumps(value), "file")
    assert loaded["default"].default_factory is list and loaded["types"] == value["types"]
    assert repr(loaded) == repr(value)
