"""``ds_bench``: collectives are timed on all ranks; the command hands what it does not know to the launcher."""

import json
import os
import subprocess
import sys

import pytest
import torch

from deepspeed.cli import bench
from deepspeed.comm.speed import OPERATIONS, measure_collectives
from deepspeed.launcher import runner
from tests.harness import run_ranks


def _measured():
    rows = measure_collectives(list(OPERATIONS), 5000, torch.bfloat16, warmups=1, trials=3)
    return [(row.operation, row.nbytes, row.seconds, row.algorithm_gbps, row.bus_gbps) for row in rows]


def test_every_operation_is_timed_alike_on_all_ranks():
    first, second = run_ranks(_measured, 2)
    assert first == second and [row[0] for row in first] == list(OPERATIONS)
    for name, nbytes, seconds, algorithm, bus in first:
        assert nbytes == 5120  # whole slices of 64 elements for 2 ranks
        assert 0 < seconds < 60 and algorithm == pytest.approx(nbytes * 8 / seconds / 1e9)
        halves = name.startswith(("all_gather", "reduce_scatter", "all_to_all"))
        assert bus == pytest.approx(algorithm * (0.5 if halves else 1.0)), name


def test_the_launcher_gets_its_options(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    given = []
    monkeypatch.setattr(runner, "main", given.append)
    bench.main(["--num_gpus", "2", "--all-reduce", "--trials", "7"])
    assert given[0][:5] == ["--num_gpus", "2", "--no_local_rank", "--module", "deepspeed.cli.bench"]
    options, rest = bench._parse(given[0][5:])
    assert not rest and options.all_reduce and not options.all_gather and options.trials == 7
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit) as stop:
        bench.main(["--bogus"])
    assert "unknown options --bogus" in str(stop.value.code)


def test_sizes_out_of_range(capsys):
    with pytest.raises(SystemExit):
        bench.main(["--maxsize", "3"])
    assert "--maxsize: expected 12 or more, found 3" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        bench.main(["--maxsize", "70"])
    assert "--maxsize: expected 40 or less, found 70" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_on_two_ranks():
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    words = [
        "--num_gpus",
        "2",
        "--scan",
        "--maxsize",
        "14",
        "--trials",
        "2",
        "--warmups",
        "1",
        "--pt2pt",
        "--broadcast",
    ]
    command = [sys.executable, "-m", "deepspeed.cli.bench", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("broadcast") == done.stdout.count("pt2pt") == 2 and "16,384" in done.stdout
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=120, env=environment)
    rows = json.loads(next(line for line in done.stdout.splitlines() if "[{" in line).split("] ", 1)[-1])
    assert [row["nbytes"] for row in rows] == [4096, 4096, 16384, 16384]
