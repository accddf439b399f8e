"""The job scripts for Slurm, run by bash under a program that stands for ``srun``."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from deepspeed.comm.start.environment import find_place

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "slurm"
SRUN = Path(__file__).with_name("fake_srun.py")
SCRIPTS = sorted(path.name for path in FOLDER.glob("*.sbatch"))

# In place of a training: says where the rank stands, and waits to be told to stop where the test wants that.
TASK = """
import importlib.util, json, os, signal, sys, time
sys.path.insert(0, {root!r})
# The file alone: its package would import torch.
spec = importlib.util.spec_from_file_location("place", {root!r} + "/deepspeed/comm/start/environment.py")
sys.modules["place"] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
told = []
signal.signal(signal.SIGUSR1, lambda number, frame: told.append(number))
place = module.find_place(os.environ)
name = f"rank{{place.rank}}"
folder = sys.argv[sys.argv.index("--save_dir") + 1]
record = [place.world_size, place.local_rank, place.address, place.port, place.run, folder]
open(name, "w").write(json.dumps(record))
if {waits}:
    if place.rank == 0:
        while len([each for each in os.listdir() if each.startswith("rank")]) < place.world_size: time.sleep(0.01)
        open("stop", "w").close()
    while not told: time.sleep(0.01)
    sys.exit(75)
"""


def run(folder, script, nodes, *, waits=False, nodelist="localhost", **variables):
    """Runs a job script; returns (exit code, what each rank has found, calls of scontrol)."""
    programs = folder / "bin"
    programs.mkdir()
    for name, line in (
        ("srun", f'exec {sys.executable} {SRUN} "$@"'),
        ("python", f'exec {sys.executable} "$@"'),
        ("scontrol", 'if [ "$1" = show ]; then printf "node0\\nnode1\\nnode2\\n"; else echo "$@" >> requeued; fi'),
    ):
        (programs / name).write_text(f"#!/bin/sh\n{line}\n")
        (programs / name).chmod(0o755)
    (folder / "train.py").write_text(TASK.format(root=str(ROOT), waits=waits))
    (folder / "settings").write_text(json.dumps({"nodes": nodes, "signal": "stop", "nodelist": nodelist}))
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    }
    environment |= {"PATH": f"{programs}:{os.environ['PATH']}", "FAKE_SLURM": "settings", "SLURM_JOB_ID": "4711"}
    environment |= {"SLURM_JOB_NODELIST": nodelist, "SLURM_JOB_NAME": "deepspeed", "DS_ACCELERATOR": "cpu", **variables}
    done = subprocess.run(
        ["bash", str(FOLDER / script)], cwd=folder, env=environment, capture_output=True, text=True, timeout=100
    )
    found = [
        json.loads((folder / f"rank{rank}").read_text())
        for rank in range(sum(nodes))
        if (folder / f"rank{rank}").exists()
    ]
    requeued = (folder / "requeued").read_text().split() if (folder / "requeued").exists() else []
    return done, found, requeued


def test_tasks_save_and_the_job_is_put_into_the_queue_again(tmp_path):
    done, found, requeued = run(tmp_path, "tasks.sbatch", [1, 1], waits=True)
    assert (done.returncode, requeued) == (75, ["requeue", "4711"]), done.stderr
    port = 15000 + 4711 % 15000
    assert [record[:4] for record in found] == [[2, 0, "localhost", port], [2, 0, "localhost", port]]


def test_members_of_an_array_have_folders_and_runs_of_their_own(tmp_path):
    variables = {"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_JOB_ID": "4700"}
    done, found, requeued = run(tmp_path, "array.sbatch", [2], **variables)
    assert (done.returncode, requeued) == (0, []), done.stderr
    assert [record[1] for record in found] == [0, 1]
    assert found[0][4:] == ["Slurm step 4711.0", "checkpoints-3"]


def test_nodes_may_have_different_numbers_of_tasks(tmp_path):
    done, found, _ = run(tmp_path, "different_nodes.sbatch", [2, 1], nodelist="big1,small[01-02]")
    assert done.returncode == 0, done.stderr
    assert [record[:3] for record in found] == [[3, 0, "big1"], [3, 1, "big1"], [3, 0, "big1"]]


def test_the_order_of_tasks_on_nodes_that_differ(tmp_path):
    """What the script writes for ``--distribution=arbitrary``: four lines for the first node, two for each other."""
    text = (FOLDER / "different_nodes.sbatch").read_text()
    script = text.replace("srun -K1 python train.py --save_dir checkpoints", 'cat "$SLURM_HOSTFILE"')
    (tmp_path / "scontrol").write_text("#!/bin/sh\nprintf 'node0\\nnode1\\nnode2\\n'\n")
    (tmp_path / "scontrol").chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, env={"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    )
    assert done.stdout.split() == ["node0"] * 4 + ["node1"] * 2 + ["node2"] * 2


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_are_sound(name):
    """bash reads them, and every option is one that sbatch and srun of Slurm 22.05 list."""
    assert subprocess.run(["bash", "-n", str(FOLDER / name)]).returncode == 0
    known = {
        "job-name", "nodes", "ntasks", "ntasks-per-node", "gpus-per-task", "gpus-per-node", "requeue", "open-mode",
        "signal", "array", "distribution",
    }  # fmt: skip
    text = (FOLDER / name).read_text()
    assert set(re.findall(r"^#SBATCH --([\w-]+)", text, re.MULTILINE)) <= known
    assert "train.py --save_dir" in text


def test_gpus_per_task_show_each_task_one_device():
    """A task then sees one device, whatever its local rank: the place keeps Slurm's local rank."""
    environ = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_JOB_NODELIST": "a,b"}
    assert find_place({**environ, "CUDA_VISIBLE_DEVICES": "0"}, device_count=1).local_rank == 1
