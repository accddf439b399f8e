"""``ds_io`` measures the file store, and fio with the same requests where that is installed."""

import json
import os
import sys
from pathlib import Path

import pytest

from deepspeed.cli import io_speed
from deepspeed.errors import OffloadError
from deepspeed.offload import file_io

FIO = """#!{python}
import json, sys
given = dict(word.lstrip("-").split("=", 1) for word in sys.argv[1:])
open({log!r}, "a").write(json.dumps(given) + "\\n")
if {fails}:
    sys.exit("no such engine")
print(json.dumps({{"jobs": [{{given["rw"]: {{"bw_bytes": 1e6}}}}]}}))
"""


def fake_fio(folder: Path, monkeypatch: pytest.MonkeyPatch, *, fails: bool = False) -> Path:
    """A fio that moves nothing, notes what it was asked for and claims 1 MB/s."""
    path, log = folder / "bin" / "fio", folder / "asked"
    path.parent.mkdir()
    path.write_text(FIO.format(python=sys.executable, log=str(log), fails=fails))
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}{os.pathsep}{os.environ['PATH']}")
    return log


def test_both_get_the_same_requests(tmp_path, monkeypatch, capsys):
    log = fake_fio(tmp_path, monkeypatch)
    place = tmp_path / "disk"
    sizes = ["--io_size", "2M", "--block_size", "64K", "--queue_depth", "3", "--io_parallel", "2", "--loops", "2"]
    io_speed.main(["--folder", str(place), *sizes, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["bytes"] == 2 << 20 and found["block_size"] == 64 << 10 and found["in_flight"] == 6
    assert all(found["bytes_per_second"][operation] > 0 for operation in ("write", "read"))
    assert found["fio_bytes_per_second"] == {"write": 1e6, "read": 1e6}
    assert found["against_fio"]["read"] == pytest.approx(found["bytes_per_second"]["read"] / 1e6)
    requested = [json.loads(line) for line in log.read_text().splitlines()]
    assert [entry["rw"] for entry in requested] == ["write", "read"] * 2
    for entry in requested:
        assert (entry["size"], entry["bs"], entry["iodepth"]) == (str(2 << 20), str(64 << 10), "6")
        assert entry["direct"] == str(int(found["direct"]))
    assert not list(place.iterdir()), "the file is gone"


def test_table_without_fio(tmp_path, capsys):
    io_speed.main(["--folder", str(tmp_path), "--io_size", "100000", "--read", "--no_fio", "--loops", "1"])
    shown = capsys.readouterr().out
    assert "102,400 bytes" in shown and "read" in shown and "write" not in shown and "not run" in shown


def test_failures_are_one_sentence(tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        fake_fio(tmp_path, patch, fails=True)
        with pytest.raises(OffloadError, match="fio failed.*--no_fio"):
            io_speed.main(["--folder", str(tmp_path), "--io_size", "1M", "--loops", "1"])
    (tmp_path / "file").write_text("")
    with pytest.raises(OffloadError, match=str(tmp_path / "file")):
        io_speed.main(["--folder", str(tmp_path / "file" / "x"), "--io_size", "1M"])
    monkeypatch.setattr(file_io, "free_bytes", lambda path: 5)
    with pytest.raises(OffloadError, match="expected 1,048,576 free bytes, found 5"):
        io_speed.main(["--folder", str(tmp_path), "--io_size", "1M"])
    # As the command, the same is its last word.
    monkeypatch.setattr(sys, "argv", ["ds_io", "--folder", str(tmp_path), "--io_size", "1M"])
    with pytest.raises(SystemExit, match="^ds_io: .*free bytes, found 5"):
        io_speed.main()
    for wrong in (["--io_size", "many"], ["--loops", "0"], ["--block_size", "0"]):
        with pytest.raises(SystemExit) as stop:
            io_speed.main(wrong)
        assert stop.value.code == 2
        assert "expected" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["512M", "512MiB", "512mib", "512MB", "524288K", "536870912", "536870912B"])
def test_spellings_of_a_size(text):
    assert io_speed.size_of(text) == 512 << 20
