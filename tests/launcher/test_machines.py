"""Several machines: network namespaces with their own addresses, names and temporary folders, over a shaped network.

Runs only what users run: the ``deepspeed`` command by ssh, torchrun, mpirun and srun, with the programs of this system.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.harness.machines import Machines, finish, needs_machines
from tests.harness.programs import needs_program
from tests.harness.slurm import SlurmCluster, needs_slurm
from tests.launcher.machines_train import batch_of, build
from tests.launcher.processes import wait_until
from tests.launcher.test_mpi import OPENMPI

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200), needs_machines]
SCRIPT = str(Path(__file__).with_name("machines_train.py"))
# A network between two buildings.
SHAPE = {"megabits": 200.0, "delay": 0.002}


def expected(steps):
    """The losses of plain torch on the whole batch."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    losses = []
    for step in range(steps):
        x, y = batch_of(step)
        loss = (model(x) - y).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    return losses


def seen(folder, ranks):
    """What each rank has written, which is removed."""
    found = []
    for rank in range(ranks):
        path = folder / f"rank{rank}.json"
        found.append(json.loads(path.read_text()))
        path.unlink()
    return found


class Torchrun:
    """One torchrun per machine."""

    def start(self, machines, arguments, numbers):
        return [
            machines[number].start(
                ["torchrun", f"--nnodes={len(numbers)}", f"--node-rank={place}", "--nproc-per-node=2",
                 f"--master-addr=node{numbers[0]}", "--master-port=29501", SCRIPT, *arguments], machines.folder,
            )
            for place, number in enumerate(numbers)
        ]  # fmt: skip


class Ssh:
    """``deepspeed`` on the first machine, which reaches the others by a real ssh server on each."""

    def start(self, machines, arguments, numbers):
        options = start_ssh_servers(machines)
        hosts = machines.folder / "hosts"
        hosts.write_text("".join(f"node{number} slots=2\n" for number in numbers))
        words = [
            "deepspeed",
            "-H",
            str(hosts),
            "--no_local_rank",
            "--launcher=ssh",
            f"--launcher_args={shlex.join(options)}",
        ]
        return [machines[numbers[0]].start([*words, SCRIPT, *arguments], machines.folder)]


class Mpirun:
    """Plain mpirun: nothing in the environment of the ranks but what Open MPI puts there."""

    def start(self, machines, arguments, numbers):
        options = start_ssh_servers(machines)
        words = ["mpirun", "-n", str(2 * len(numbers)), "--host", ",".join(f"node{number}:2" for number in numbers)]
        words += ["--mca", "plm_rsh_args", shlex.join(options), "--bind-to", "none"]
        for name in ("PYTHONPATH", "DS_ACCELERATOR", "OMP_NUM_THREADS"):
            words += ["-x", name]
        variables = {**OPENMPI, "PATH": f"{mpirun_of_openmpi(machines.folder)}:{os.environ['PATH']}"}
        command = [*words, sys.executable, SCRIPT, *arguments]
        return [machines[numbers[0]].start(command, machines.folder, variables=variables)]


class Srun:
    """A task per rank under a Slurm cluster: nothing in the environment of the ranks but what Slurm puts there."""

    def start(self, machines, arguments, numbers):
        if not hasattr(machines, "slurm"):
            machines.slurm = SlurmCluster(machines)
        words = ["srun", "-K1", "-w", ",".join(f"node{number}" for number in numbers), f"-N{len(numbers)}"]
        words += [f"-n{2 * len(numbers)}", "--ntasks-per-node=2", "--gpus-per-task=1"]
        return [machines.slurm.start(*words, sys.executable, SCRIPT, *arguments)]


def mpirun_of_openmpi(folder):
    """A folder in which mpirun is Open MPI's: several may be installed."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    (programs / "mpirun").write_text('#!/bin/sh\nexec mpirun.openmpi "$@"\n')
    (programs / "mpirun").chmod(0o755)
    return programs


def start_ssh_servers(machines):
    """Starts an ssh server on every machine, with one key for all; returns the options of ssh that use it."""
    folder = machines.folder / "ssh"
    options = [
        "-i", str(folder / "key"), "-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null",
        "-o", "LogLevel=ERROR", "-o", "IdentitiesOnly=yes",
    ]  # fmt: skip
    if folder.exists():
        return options
    folder.mkdir()
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "key")], check=True)
    settings = [
        f"HostKey {folder / 'key'}", f"AuthorizedKeysFile {folder / 'key.pub'}", "StrictModes no", "UsePAM no",
        "PasswordAuthentication no", "PermitRootLogin prohibit-password", "PidFile none",
    ]  # fmt: skip
    (folder / "sshd_config").write_text("\n".join(settings) + "\n")
    for machine in machines.all:
        words = ["/usr/sbin/sshd", "-f", str(folder / "sshd_config")]
        subprocess.run(machine.command(words), check=True)
    return options


FORMS = {
    "torchrun": pytest.param(Torchrun(), id="torchrun"),
    "ssh": pytest.param(Ssh(), id="ssh", marks=needs_program("sshd")),
    "mpirun": pytest.param(Mpirun(), id="mpirun", marks=[needs_program("sshd"), needs_program("mpirun.openmpi")]),
    "srun": pytest.param(Srun(), id="srun", marks=needs_slurm),
}


def succeed(processes, timeout=400):
    results = [finish(process, timeout) for process in processes]
    for code, out, err in results:
        assert code == 0, f"{out[-2000:]}\n{err[-6000:]}"
    return results


@pytest.mark.parametrize("form", FORMS.values())
def test_two_machines_train_as_one_process_and_share_a_folder(form, tmp_path):
    losses = expected(8)
    with Machines(tmp_path, 2, loopback=(0, 1), **SHAPE) as machines:
        for stage in (1, 3):
            folder = str(tmp_path / f"stage{stage}")
            succeed(form.start(machines, [str(stage), folder, "0", "5"], (0, 1)))
            found = seen(tmp_path, 4)
            assert [one["host"] for one in found] == ["node0", "node0", "node1", "node1"]
            assert [one["local_rank"] for one in found] == [0, 1, 0, 1]
            for one in found:
                assert one["losses"] == pytest.approx(losses[:5], rel=1e-5)
            # The same on one machine: another number of ranks.
            succeed(form.start(machines, [str(stage), folder, "5", "8"], (1,)))
            for one in seen(tmp_path, 2):
                assert (one["host"], one["losses"]) == ("node1", pytest.approx(losses[5:], rel=1e-5))
        assert min(machines.sent()) > 10_000


@pytest.mark.parametrize("stage", [1, 3])
def test_machines_without_a_shared_folder_keep_their_own_ranks_files(stage, tmp_path):
    """Each machine has a part of the checkpoint; all parts in one folder are a checkpoint for any number of ranks."""
    losses = expected(8)
    form, arguments = Torchrun(), [str(stage), "/tmp/checkpoints"]
    with Machines(tmp_path, 2, **SHAPE) as machines:
        succeed(form.start(machines, [*arguments, "0", "5"], (0, 1)))
        seen(tmp_path, 4)
        parts = [machine.path("/tmp/checkpoints") for machine in machines.all]
        names = [{str(path.relative_to(part)) for path in part.rglob("*") if path.is_file()} for part in parts]
        assert names[0] != names[1] and all(any("rank" in name for name in some) for some in names), names
        # The same ranks on the same machines continue from their own parts.
        succeed(form.start(machines, [*arguments, "5", "8"], (0, 1)))
        for one in seen(tmp_path, 4):
            assert one["losses"] == pytest.approx(losses[5:], rel=1e-5)
        # One machine alone has too little, and reports what is missing.
        ((code, _, err),) = [finish(one, 400) for one in form.start(machines, [*arguments, "8", "9"], (1,))]
        assert code != 0 and "found none of rank 0" in err and "ranks saved into 2 folders" in err
        union = tmp_path / "union"
        for part in parts:
            shutil.copytree(part, union, dirs_exist_ok=True)
        succeed(form.start(machines, [str(stage), str(union), "8", "9"], (1,)))
        for one in seen(tmp_path, 2):
            assert one["losses"] == pytest.approx(expected(9)[8:], rel=1e-5)


# Under mpirun the ranks end too, but Open MPI 4.1 continues waiting for its daemon on the lost machine.
@pytest.mark.parametrize("form", [FORMS["torchrun"], FORMS["ssh"]])
def test_a_machine_that_is_lost_ends_the_run_and_one_machine_continues(form, tmp_path):
    """No word comes from the lost machine, and no connection to it is closed: its packets just stop."""
    folder = str(tmp_path / "checkpoints")
    with Machines(tmp_path, 2, **SHAPE) as machines:
        succeed(form.start(machines, ["3", folder, "0", "5"], (0, 1)))
        seen(tmp_path, 4)
        processes = form.start(machines, ["3", folder, "5", "8", "up"], (0, 1))
        wait_until(lambda: len(list(tmp_path.glob("up*"))) == 4, 240, "first step of all ranks")
        machines.cut(1)
        machines[1].lose()
        started = time.monotonic()
        code, out, err = finish(processes[0], 200)
        assert code != 0 and time.monotonic() - started < 100
        if isinstance(form, Ssh):
            assert "deepspeed: node 1 (ranks 2 to 3, host node1) was lost" in err
        left = machines[0].run(["ps", "ax"], tmp_path)[1]
        assert "machines_train" not in left, left
        succeed(form.start(machines, ["3", folder, "5", "8"], (0,)))
        for one in seen(tmp_path, 2):
            assert one["losses"] == pytest.approx(expected(8)[5:], rel=1e-5)


RANK = """
import os
from datetime import timedelta
import torch
import deepspeed
deepspeed.init_distributed(timeout=timedelta(seconds=float(os.environ["LIMIT"])))
ranks = torch.ones(1) * (1 + torch.distributed.get_rank())
torch.distributed.all_reduce(ranks)
print("sum", ranks.item())
"""
FIRST, SECOND = "10.77.0.1", "10.77.0.2"
OWN = [(FIRST, "node0"), (SECOND, "node1")]


def start_ranks(machines, limit):
    """A rank per machine, told by hand to meet at the name ``master``."""
    variables = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "master", "MASTER_PORT": "29511"}
    return [
        machine.start([sys.executable, "-c", RANK], machines.folder, {**variables, "RANK": str(rank), "LIMIT": limit})
        for rank, machine in enumerate(machines.all)
    ]


@pytest.mark.parametrize(
    ("on_first", "on_second"),
    [
        pytest.param([("127.0.1.1", "node0"), ("127.0.1.1", "master")], [(FIRST, "master"), *OWN], id="loopback"),
        pytest.param(
            [(FIRST, "master"), *OWN], [("fd77::99", "master"), (FIRST, "master"), *OWN], id="dead IPv6 first"
        ),
        pytest.param([("fd77::1", "master"), *OWN], [("fd77::1", "master"), *OWN], id="IPv6 only"),
        pytest.param([("10.77.0.77", "master"), *OWN], [(FIRST, "master"), *OWN], id="another machine for rank 0"),
        pytest.param(OWN, [(FIRST, "master"), *OWN], id="unknown to rank 0"),
        pytest.param(
            [(FIRST, "master"), *OWN], [(FIRST, "master"), (FIRST, "node0"), ("fd77::2", "node1")], id="two families"
        ),
    ],
)
def test_a_name_that_machines_resolve_differently_leads_to_a_start(on_first, on_second, tmp_path):
    with Machines(tmp_path, 2) as machines:
        machines[0].name_hosts(on_first)
        machines[1].name_hosts(on_second)
        for _, out, _ in succeed(start_ranks(machines, limit="120")):
            assert out.split() == ["sum", "3.0"]


def test_a_name_that_comes_late_is_waited_for_and_one_that_never_comes_is_named(tmp_path):
    with Machines(tmp_path, 2) as machines:
        machines[0].name_hosts([(FIRST, "master"), *OWN])
        machines[1].name_hosts(OWN)
        late = start_ranks(machines, limit="200")
        err = ""
        for line in late[1].stderr:  # up to the line that it waits
            err += line
            if "still waiting for rank 0" in line:
                break
        assert "host node1 cannot resolve the name master" in err
        machines[1].name_hosts([(FIRST, "master"), *OWN])
        for _, out, _ in succeed(late):
            assert out.split() == ["sum", "3.0"]
        machines[1].name_hosts(OWN)
        (_, _, first), (code, _, second) = [finish(each, 150) for each in start_ranks(machines, limit="5")]
        assert (
            code != 0 and "rank 0 was not reached within 0:00:05: host node1 cannot resolve the name master" in second
        )
        assert "rank 1 of 2 did not connect to master:29511" in first


@needs_slurm
def test_slurm_places_ranks_on_nodes_that_differ(tmp_path):
    losses = expected(4)
    with Machines(tmp_path, 2, **SHAPE) as machines:
        slurm = SlurmCluster(machines)
        hosts = tmp_path / "tasks"
        hosts.write_text("node0\nnode0\nnode0\nnode1\n")
        succeed([
            slurm.start("srun", "-K1", "-N2", "-n4", "--distribution=arbitrary", sys.executable, SCRIPT, "3",
                        str(tmp_path / "one"), "0", "4", SLURM_HOSTFILE=str(hosts))
        ])  # fmt: skip
        found = seen(tmp_path, 4)
        assert [(one["host"], one["local_rank"]) for one in found] == [
            ("node0", 0), ("node0", 1), ("node0", 2), ("node1", 0)
        ]  # fmt: skip
        assert all(one["losses"] == pytest.approx(losses, rel=1e-5) for one in found)
