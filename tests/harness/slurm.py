"""A Slurm cluster on the machines of :mod:`tests.harness.machines`: a controller on the first, a node on each."""

import os
import shutil
import subprocess
import time
from collections.abc import Sequence

import pytest

from tests.harness.machines import Machines

_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sinfo")
_PATH = f"{os.environ['PATH']}:/usr/sbin"

needs_slurm = pytest.mark.skipif(
    not all(shutil.which(name, path=_PATH) for name in _PROGRAMS),
    reason=f"needs {', '.join(_PROGRAMS)} (Debian: slurmctld slurmd slurm-client munge)",
)

_CONFIGURATION = """
ClusterName=test
SlurmctldHost=node0
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=cred_expire=5
StateSaveLocation=/run/slurm/state
SlurmdSpoolDir=/run/slurm/spool
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
MpiDefault=none
JobRequeue=1
GresTypes=gpu
SlurmdTimeout=30
SchedulerParameters=sched_interval=1,batch_sched_delay=0
NodeName=node[0-{last}] CPUs=4 RealMemory=1000 Gres=gpu:4 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP MaxTime=INFINITE
"""


class SlurmCluster:
    """A cluster whose nodes have four processors and four devices each, which are plain files.

    Args:
        machines: Its machines; it ends with them.
    """

    def __init__(self, machines: Machines) -> None:
        self._machines = machines
        self._folder = machines.folder / "slurm"
        self._folder.mkdir()
        configuration = self._folder / "slurm.conf"
        configuration.write_text(_CONFIGURATION.format(last=len(machines.all) - 1))
        (self._folder / "gres.conf").write_text("Name=gpu File=/tmp/gpu[0-3]\n")
        self.variables = {"SLURM_CONF": str(configuration)}
        key = self._folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        for machine in machines.all:
            script = "cd /tmp; touch gpu0 gpu1 gpu2 gpu3; mkdir -p -m 755 /run/munge /run/slurm/state /run/slurm/spool"
            assert machine.run(["sh", "-c", script], self._folder)[0] == 0
            self._serve(
                machine.name, ["munged", "--foreground", "--force", f"--key-file={key}", "--pid-file=/run/munge/pid",
                 "--seed-file=/run/munge/seed", "--log-file=/run/munge/log", "--socket=/run/munge/munge.socket.2"],
            )  # fmt: skip
            _wait(lambda machine=machine: machine.path("/run/munge/munge.socket.2").exists(), 60, "munge")
        self._serve("node0", ["slurmctld", "-D", "-f", str(configuration)])
        for machine in machines.all:
            self._serve(machine.name, ["slurmd", "-D", "-f", str(configuration), "-N", machine.name])
        _wait(lambda: self.run("sinfo", "-h", "-o", "%T %D")[1].strip() == f"idle {len(machines.all)}", 90, "nodes")

    def start(self, *words: str, **variables: str) -> subprocess.Popen[str]:
        """Starts a program of Slurm on the first machine."""
        return self._machines[0].start(words, self._machines.folder, {**self.variables, **variables})

    def run(self, *words: str) -> tuple[int, str, str]:
        """Runs a program of Slurm to its end: (exit code, stdout, stderr)."""
        return self._machines[0].run(words, self._machines.folder, variables=self.variables)

    def _serve(self, name: str, words: Sequence[str]) -> None:
        machine = next(one for one in self._machines.all if one.name == name)
        with open(self._folder / f"{words[0]}-{name}.log", "w", encoding="utf-8") as log:
            variables = {**self.variables, "PATH": _PATH}
            machine.start(words, self._folder, variables, stdout=log, stderr=subprocess.STDOUT)


def _wait(is_so, seconds, what):
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, f"no {what} after {seconds} s"
        time.sleep(0.2)
