"""Running examples as their pages say: the commands they name, and a stand-in for the scheduler of a cluster."""

import os
import re
import runpy
import shlex
import shutil
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"

# Commands of the pages, with this environment's Python.
COMMANDS = {
    "python": "",
    "deepspeed": "-m deepspeed.launcher.runner",
    "torchrun": "-m torch.distributed.run",
    "accelerate": "-m accelerate.commands.accelerate_cli",
}


class Desk:
    """A copy of an example's folder, with its neighbors, in which commands are run.

    Args:
        folder: An empty folder.
        example: Name of the example.
        on_gpus: Leave this machine's GPUs to the commands; otherwise all of them run on the CPU.
    """

    def __init__(self, folder: Path, example: str, on_gpus: bool = False) -> None:
        self.examples = folder / "examples"
        leave_out = shutil.ignore_patterns("__pycache__", "data")
        shutil.copytree(EXAMPLES, self.examples, ignore=leave_out)
        self.folder = self.examples / example
        self.bin = folder / "bin"
        self.bin.mkdir()
        for name, module in COMMANDS.items():
            self.command(name, f'exec {shlex.quote(sys.executable)} {module} "$@"')
        self.on_gpus = on_gpus
        self.environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "ACCELERATE_"))},
            "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
            **({} if on_gpus else {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PET_MASTER_PORT": str(free_port()),  # torchrun's, so that two tests can run at a time
        }
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            self.environ.pop(name, None)

    def command(self, name: str, body: str) -> None:
        """Puts a shell script on the path."""
        path = self.bin / name
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(0o755)

    def run(self, line: str, timeout: float = 150, fails: bool = False) -> str:
        """Runs a command line in the example's folder; returns what it printed."""
        done = subprocess.run(
            ["bash", "-c", line], cwd=self.folder, env=self.environ, capture_output=True, text=True, timeout=timeout
        )
        assert (done.returncode != 0) == fails, f"{line}\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
        return done.stdout + (done.stderr if fails else "")

    def sbatch(self, job: str, *arguments: str, timeout: float = 200) -> str:
        """Runs a job file as SLURM would, all nodes being this machine."""
        requested = dict(
            re.findall(r"^#SBATCH --([\w-]+)[ =](\S+)", (self.folder / job).read_text(), flags=re.MULTILINE)
        )
        nodes = int(requested["nodes"])
        per_node = int(requested.get("ntasks-per-node") or requested["tasks-per-node"])
        scratch = self.folder / "scratch"
        scratch.mkdir()
        self._cluster_commands()
        self.environ.update(
            SLURM_JOB_ID=str(free_port() % 10_000), SLURM_JOB_NAME=job, SLURM_NNODES=str(nodes),
            SLURM_JOB_NUM_NODES=str(nodes), SLURM_NTASKS=str(nodes * per_node), SLURM_NTASKS_PER_NODE=str(per_node),
            SLURM_NODELIST="localhost", SLURM_TMPDIR=str(scratch),
        )  # fmt: skip
        try:
            return self.run(shlex.join(["bash", job, *arguments]), timeout)
        finally:
            for name in [name for name in self.environ if name.startswith("SLURM_")]:
                del self.environ[name]

    def _cluster_commands(self) -> None:
        """What job files call. Environments are not made, since this one has everything."""
        for name in ("module", "pip"):
            self.command(name, "exit 0")
        self.command("virtualenv", 'for last; do :; done; mkdir -p "$last/bin"; touch "$last/bin/activate"')
        self.command("hostname", f"echo localhost:{free_port()}")
        if not self.on_gpus:
            # Lightning and Accelerate ask for GPUs; nothing else of the scripts is replaced.
            on_cpu = shlex.quote(str(self.examples / "on_cpu.py"))
            self.command("python", f'exec {shlex.quote(sys.executable)} {on_cpu} "$@"')
        srun = self.bin / "srun"
        srun.write_text(f"#!{sys.executable}\n{textwrap.dedent(SRUN)}")
        srun.chmod(0o755)


SRUN = """
    import os, subprocess, sys
    words, tasks = sys.argv[1:], int(os.environ["SLURM_NTASKS"])
    while words[0] in ("-N", "-n"):
        tasks = int(words[1]) if words[0] == "-n" else tasks
        words = words[2:]
    nodes = int(os.environ["SLURM_NNODES"])
    started = []
    for task in range(tasks):
        node, local = divmod(task, tasks // nodes)
        place = {"SLURM_PROCID": task, "SLURM_LOCALID": local, "SLURM_NODEID": node}
        environ = {**os.environ, **{name: str(value) for name, value in place.items()}, "SLURM_NTASKS": str(tasks)}
        started.append(subprocess.Popen(words, env=environ))
    codes = [process.wait() for process in started]
    sys.exit(next((code for code in codes if code), 0))
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def page(example: str) -> str:
    return (EXAMPLES / example / "README.md").read_text()


def commands_of(example: str) -> list[str]:
    """The command lines of an example's page: lines of its ``sh`` blocks, continued lines joined."""
    blocks = re.findall(r"```sh\n(.*?)```", page(example), flags=re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [" ".join(line.split("#")[0].split()) for line in lines if line.split("#")[0].strip()]


def run_script(script: Path, *arguments: str) -> dict:
    """Runs a script in a rank of the harness, where torch and the libraries are loaded already."""
    before, argv, path = set(sys.modules), sys.argv, list(sys.path)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    try:
        return runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.argv, sys.path[:] = argv, path
        for name in set(sys.modules) - before:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(str(EXAMPLES)):
                del sys.modules[name]
