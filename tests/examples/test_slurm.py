"""The job scripts for Slurm, run by bash under a program that stands for ``srun``."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deepspeed.comm.base.environment import find_place
from tests.harness.machines import Machines, needs_machines
from tests.harness.slurm import SlurmCluster, needs_slurm

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "slurm"
SRUN = Path(__file__).with_name("fake_srun.py")
SCRIPTS = sorted(path.name for path in FOLDER.glob("*.sbatch"))

# In place of a training: prints where the rank stands, and waits for a signal to stop where the test wants that.
TASK = """
import importlib.util, json, os, signal, sys, time
sys.path.insert(0, {root!r})
# The file alone: its package would import torch.
spec = importlib.util.spec_from_file_location("place", {root!r} + "/deepspeed/comm/base/environment.py")
sys.modules["place"] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
received = []
signal.signal(signal.SIGUSR1, lambda number, frame: received.append(number))
place = module.find_place(os.environ)
name = f"rank{{place.rank}}"
folder = sys.argv[sys.argv.index("--save_dir") + 1]
record = [place.world_size, place.local_rank, place.address, place.port, place.run, folder]
open(name, "w").write(json.dumps(record))
if {waits}:
    if place.rank == 0:
        while len([each for each in os.listdir() if each.startswith("rank")]) < place.world_size: time.sleep(0.01)
        open("stop", "w").close()
    while not received: time.sleep(0.01)
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
    script = text.replace(
        "srun -K1 --distribution=arbitrary python train.py --save_dir checkpoints", 'cat "$SLURM_HOSTFILE"'
    )
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
        "signal", "array",
    }  # fmt: skip
    text = (FOLDER / name).read_text()
    assert set(re.findall(r"^#SBATCH --([\w-]+)", text, re.MULTILINE)) <= known
    assert "train.py --save_dir" in text


def test_gpus_per_task_show_each_task_one_device():
    """A task then sees one device, whatever its local rank: the place keeps Slurm's local rank."""
    environ = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_JOB_NODELIST": "a,b"}
    assert find_place({**environ, "CUDA_VISIBLE_DEVICES": "0"}, device_count=1).local_rank == 1


# --- a real cluster ---------------------------------------------------------------------------------------------------

# The example, with the number of steps from a file: a run continues until the test has seen enough of it.
STEPS = """
import runpy, sys
sys.argv += ["--steps", open("steps").read()]
runpy.run_path({script!r}, run_name="__main__")
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slurm")
    with Machines(folder, 2) as machines:
        yield SlurmCluster(machines), folder


@pytest.fixture
def job(cluster, request):
    """Submits a job script of the example: (script, options, steps of the training) to (the job's number, folder)."""
    slurm, shared = cluster

    def submit(script, *options, steps):
        folder = shared / script
        folder.mkdir()
        (folder / "train.py").write_text(STEPS.format(script=str(ROOT / "examples" / "places" / "train.py")))
        (folder / "steps").write_text(str(steps))
        code, out, err = slurm.run("sbatch", "--parsable", f"--chdir={folder}", *options, str(FOLDER / script))
        assert code == 0, err
        return out.strip(), folder

    return submit


def state(slurm, number):
    """The fields that Slurm shows of a job."""
    out = slurm.run("scontrol", "show", "job", number)[1]
    return dict(re.findall(r"(\w+)=(\S*)", out))


def wait_for_job(slurm, number, folder, is_so, what):
    """Waits for something of a job; shows what it has printed if it ends in another way."""
    deadline = time.monotonic() + 400
    while not is_so():
        found = state(slurm, number)
        is_over = time.monotonic() > deadline or found["JobState"] == "FAILED"
        assert not is_over, f"no {what}: {found}\n{printed(folder)}"
        time.sleep(0.2)


def printed(folder):
    return "\n".join(path.read_text(errors="replace") for path in sorted(folder.glob("slurm-*.out")))


def complete(slurm, number, folder):
    """Waits for the end of a job; returns its fields."""
    over = ("COMPLETED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
    wait_for_job(slurm, number, folder, lambda: state(slurm, number)["JobState"] in over, "end of the job")
    found = state(slurm, number)
    assert found["JobState"] == "COMPLETED", f"{found}\n{printed(folder)}"
    return found


on_a_cluster = [pytest.mark.slow, pytest.mark.timeout(1200), needs_machines, needs_slurm]


@pytest.mark.parametrize(
    "script", [pytest.param(name, marks=on_a_cluster) for name in ("tasks.sbatch", "nodes.sbatch")]
)
def test_slurm_requeues_a_job_on_two_nodes_and_it_continues(script, cluster, job):
    slurm, _ = cluster
    # The second asks for devices only, so that the tasks share one processor per node.
    options = ["--ntasks-per-node=2"] if script == "tasks.sbatch" else ["--ntasks-per-node=1", "--gpus-per-node=2"]
    number, folder = job(script, *options, steps=10**9)
    wait_for_job(slurm, number, folder, lambda: (folder / "checkpoints" / "latest").exists(), "checkpoint")
    (folder / "steps").write_text("1")
    # As Slurm does it before the time limit: to the tasks, not to the job script.
    assert slurm.run("scancel", "--signal=USR1", number)[0] == 0
    wait_for_job(slurm, number, folder, lambda: state(slurm, number)["Restarts"] == "1", "second run")
    fields = complete(slurm, number, folder)
    text = printed(folder)
    assert (fields["NumNodes"], text.count("4 rank(s) on 2 host(s)")) == ("2", 2), text
    steps = int(re.search(r"done after step (\d+)", text).group(1))
    assert steps >= 50 and (folder / "checkpoints" / "latest").read_text().strip() == f"global_step{steps}"


@pytest.mark.parametrize("script", [pytest.param("array.sbatch", marks=on_a_cluster)])
def test_slurm_runs_two_members_of_an_array_beside_each_other(script, cluster, job):
    slurm, _ = cluster
    number, folder = job(script, "--array=0-1", "--nodelist=node0", "--ntasks=2", steps=60)
    for member in (0, 1):
        fields = complete(slurm, f"{number}_{member}", folder)
        assert (fields["NodeList"], (folder / f"checkpoints-{member}" / "latest").read_text().strip()) == (
            "node0",
            "global_step50",
        )
    assert printed(folder).count("done after step 60") == 2


@pytest.mark.parametrize("script", [pytest.param("different_nodes.sbatch", marks=on_a_cluster)])
def test_slurm_starts_different_numbers_of_ranks_on_nodes(script, cluster, job):
    slurm, _ = cluster
    number, folder = job(script, "--nodes=2", "--ntasks=6", steps=55)
    complete(slurm, number, folder)
    text = printed(folder)
    assert "6 rank(s) on 2 host(s)" in text and "done after step 55" in text
    lines = dict(re.findall(r"(node\d): (rank .*)", text))
    assert (lines["node0"].count("local"), lines["node1"].count("local")) == (4, 2)
