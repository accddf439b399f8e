"""``ds_nvme_tune``: every choice is measured, the best one is printed as a section that the configuration takes."""

import json

import pytest

from deepspeed.cli import nvme_tune
from deepspeed.cli.nvme_tune import TuneTrial, best_of
from deepspeed.config import parse
from deepspeed.errors import DeepSpeedConfigError, NotYetSupportedError
from deepspeed.offload.file_io import IoSettings
from deepspeed.offload.speed import FileSpeed


def trial(block, depth, write, read):
    return TuneTrial(IoSettings(block, depth, 1), (FileSpeed(4096, True, {"write": write, "read": read}, {}),))


def test_the_fastest_with_the_fewest_requests_is_taken():
    slow, fast, nearly = trial(1 << 20, 4, 1e9, 1e9), trial(1 << 20, 32, 2e9, 2e9), trial(4 << 20, 8, 1.97e9, 1.97e9)
    assert best_of([slow, fast, nearly]) is nearly
    assert best_of([slow, fast]) is fast
    lopsided = trial(1 << 20, 4, 9e9, 0.5e9)  # what counts is the time for both ways
    assert best_of([lopsided, slow]) is slow


def test_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sweep.json").write_text(
        json.dumps({"block_size": ["64K", 131072], "io_parallel": [1, 2], "queue_depth": 2})
    )
    folders = [str(tmp_path / "a"), str(tmp_path / "b")]
    nvme_tune.main(
        ["--nvme_dir", *folders, "--sweep_config", "sweep.json", "--io_size", "256K", "--loops", "1", "--verbose"]
    )
    shown = capsys.readouterr().out
    section = json.loads(shown[shown.index("{") :])
    assert parse({"train_batch_size": 1, **section}).root.aio.queue_depth == 2
    log = json.loads((tmp_path / "_aio_bench_logs" / "ds_nvme_tune.json").read_text())
    tried = [(each["block_size"], each["queue_depth"], each["intra_op_parallelism"]) for each in log["results"]]
    assert tried == [(65536, 2, 1), (65536, 2, 2), (131072, 2, 1), (131072, 2, 2)]
    assert all(set(each["bytes_per_second"]) == set(folders) for each in log["results"])
    assert all(
        speed > 0 for each in log["results"] for found in each["bytes_per_second"].values() for speed in found.values()
    )
    assert shown.count("block_size 65536") == 2 and "4 choices" in shown
    assert not any(list((tmp_path / name).iterdir()) for name in "ab"), "the files are gone"


@pytest.mark.parametrize(
    ("words", "error", "text"),
    [
        (["--gds"], NotYetSupportedError, "files always pass through host memory"),
        (["--no_read", "--no_write"], DeepSpeedConfigError, "nothing to measure"),
        (["--sweep_config", "missing.json"], DeepSpeedConfigError, "missing.json: cannot be read as JSON"),
        (["--sweep_config", "typo.json"], DeepSpeedConfigError, "blok_size is not a setting of the sweep"),
        (["--sweep_config", "word.json"], DeepSpeedConfigError, "queue_depth: 'many' is not a size"),
        (["--sweep_config", "flag.json"], DeepSpeedConfigError, "queue_depth: 'True' is not a size"),
        (["--log_dir", "word.json"], DeepSpeedConfigError, "--log_dir word.json: cannot be written"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path, monkeypatch, words, error, text):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "typo.json").write_text('{"blok_size": [1]}')
    (tmp_path / "word.json").write_text('{"queue_depth": ["many"]}')
    (tmp_path / "flag.json").write_text('{"queue_depth": true}')
    monkeypatch.setattr(nvme_tune, "sweep", lambda *args, **kwargs: pytest.fail("measured first"))
    with pytest.raises(error, match=text):
        nvme_tune.main(["--nvme_dir", str(tmp_path), *words])
    monkeypatch.setattr("sys.argv", ["ds_nvme_tune", "--nvme_dir", str(tmp_path), *words])
    with pytest.raises(SystemExit) as stop:
        nvme_tune.main()
    assert str(stop.value.code).startswith("ds_nvme_tune: ")
