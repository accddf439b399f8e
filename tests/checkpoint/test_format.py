"""What is missing, cut off or altered is named, on every rank alike, and nothing is half loaded."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from deepspeed import comm
from deepspeed.checkpoint.format import MANIFEST
from deepspeed.errors import CheckpointError
from tests.checkpoint.training import engine, fragments, train
from tests.harness import assert_states_equal, run_ranks


def save(folder: str):
    run = engine(2, "bf16")
    train(run, range(2))
    run.save_checkpoint(folder, tag="one")
    run.save_checkpoint(folder, tag="two")
    comm.barrier()


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("original")
    run_ranks(save, 2, str(folder))
    return folder


@pytest.fixture
def folder(original, tmp_path):
    shutil.copytree(original, tmp_path / "copy")
    return tmp_path / "copy"


def try_to_load(folder: str, tag: str | None, options: dict, settings: dict):
    """The error, and whether anything had changed."""
    run = engine(3, "bf16", seed=8, checkpoint=settings)
    train(run, range(1))
    before, rate = fragments(run), run.get_lr()
    try:
        loaded = run.load_checkpoint(folder, tag=tag, **options)
    except CheckpointError as error:
        assert_states_equal(fragments(run), before)
        assert run.get_lr() == rate and run.global_steps == 1
        return str(error)
    return loaded


def load(folder: Path, tag: str | None = None, *, ranks: int = 2, settings: dict | None = None, **options):
    results = run_ranks(try_to_load, ranks, str(folder), tag, options, settings or {})
    assert all(type(result) is type(results[0]) for result in results)
    if isinstance(results[0], str):
        assert all(result == results[0] for result in results)
    return results[0]


def change_byte(path: Path, position: int = -5) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def cut_off(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 3)


DATA = [
    "rank00001-master.safetensors",
    "rank00000-optimizer.exp_avg.safetensors",
    "rank00000-buffers.safetensors",
    "rank00000-training.pt",
    "mp_rank_00_model_states.pt",
    MANIFEST,
]


def try_each(folder: str, names: list[str]):
    """The message for each damaged copy, from one engine that must stay as it was."""
    run = engine(3, "bf16", seed=8)
    train(run, range(1))
    before, rate = fragments(run), run.get_lr()
    messages = {}
    for name in names:
        with pytest.raises(CheckpointError) as raised:
            run.load_checkpoint(Path(folder) / name)
        messages[name] = str(raised.value)
        assert_states_equal(fragments(run), before)
        assert run.get_lr() == rate and run.global_steps == 1
        run.load_checkpoint(Path(folder) / name, tag="one", load_optimizer_states=False, load_module_only=True)
        run.load_checkpoint(Path(folder) / name, tag="one")
        before, rate, run.global_steps = fragments(run), run.get_lr(), 1
    return messages


@pytest.mark.parametrize("damage", [change_byte, cut_off, os.unlink], ids=["altered", "cut-off", "missing"])
def test_damaged_file_is_named(damage: Callable[[Path], None], original, tmp_path):
    for name in DATA:
        shutil.copytree(original, tmp_path / name)
        damage(tmp_path / name / "two" / name)
    first, second = run_ranks(try_each, 2, str(tmp_path), DATA)
    assert first == second
    for name, message in first.items():
        assert name in message, message
        assert "another tag" in message or "copy it again" in message, message


def test_checksums_can_be_turned_off(folder):
    change_byte(folder / "two" / "rank00001-master.safetensors")
    assert isinstance(load(folder, settings={"verify_checksums": False}), tuple)


def test_padding_and_foreign_slices_are_not_read(folder):
    """One rank of two needs about half of the tensors."""
    results = run_ranks(bytes_read, 2, str(folder))
    total = sum(path.stat().st_size for path in (folder / "two").glob("*.safetensors"))
    assert all(read < 0.75 * total for read in results), (results, total)


def bytes_read(folder: str) -> int:
    """Bytes of tensors that one rank reads, checksums off so that only the needed ranges count."""
    from deepspeed.checkpoint import reader

    run = engine(3, "bf16", seed=8, checkpoint={"verify_checksums": False})
    count = 0
    original = reader._read_at

    def counting(descriptor, out, offset):
        nonlocal count
        got = original(descriptor, out, offset)
        count += got
        return got

    reader._read_at = counting
    try:
        run.load_checkpoint(folder)
    finally:
        reader._read_at = original
    small = sum(path.stat().st_size for path in (Path(folder) / "two").glob("*.pt"))
    return count - small


def test_missing_tag_lists_what_exists(folder):
    message = load(folder, "three")
    assert "'three'" in message and "'one'" in message and "'two'" in message and "latest" in message


def test_latest_that_names_nothing(folder):
    (folder / "latest").write_text("gone\n")
    message = load(folder)
    assert "'gone'" in message and "'one', 'two'" in message


def test_latest_may_end_in_a_newline(folder):
    (folder / "latest").write_text("one\n")
    assert load(folder)[0] == str(folder / "one")


def test_latest_missing_although_there_are_checkpoints(folder):
    (folder / "latest").unlink()
    assert "'one', 'two'" in load(folder)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"../../etc"])
def test_latest_without_sense(content, folder):
    (folder / "latest").write_bytes(content)
    assert isinstance(load(folder), str)


def test_no_checkpoint_at_all(tmp_path):
    assert load(tmp_path) == (None, None)
    assert load(tmp_path / "nothing") == (None, None)
    assert "must_exist" in load(tmp_path, must_exist=True)


def test_a_tag_must_not_lead_outside(folder):
    for tag in ("../two", "/etc", "a/../../b", ""):
        assert "not a name for a checkpoint" in load(folder, tag), tag


def test_a_checkpoint_set_aside_by_a_killed_save_is_found(folder):
    """Between the two renames of a repeated tag."""
    os.rename(folder / "two", folder / ".replaced-two")
    path, _ = load(folder)
    assert path == str(folder / ".replaced-two")


def resave(folder: str, tag: str):
    run = engine(2, "bf16")
    run.save_checkpoint(folder, tag=tag)
    comm.barrier()
    return sorted(os.listdir(folder))


@pytest.mark.parametrize("tag", ["two", "three"])
def test_a_killed_replacement_is_completed_by_the_next_save(tag, folder):
    os.rename(folder / "two", folder / ".replaced-two")
    (folder / ".saving-0123456789abcdef").mkdir()
    (folder / ".saving-0123456789abcdef" / "rank00000-master.safetensors").write_bytes(b"half")
    (folder / ".saving-latest").write_text("half")
    after = run_ranks(resave, 2, str(folder), tag)[0]
    assert not [name for name in after if name.startswith(".")]
    assert {"one", "two", tag} <= set(after)


def test_digest_is_of_the_content_not_of_the_text(folder):
    """A manifest that was only laid out anew is the same."""
    path = folder / "two" / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()), indent=1))
    assert isinstance(load(folder), tuple)
