"""Programs that start ranks, run for real where they are installed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from deepspeed.ports import free_port
from tests.harness.programs import needs_program
from tests.launcher.processes import Launcher, wait_until

# mpirun refuses to run as root unless told twice, and counts processors unless told not to.
OPENMPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}
SUM = """
    import torch, deepspeed.comm as dist
    dist.init_distributed()
    x = torch.tensor([rank + 1.0]); dist.all_reduce(x)
    place = (os.environ[name] for name in ("LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK"))
    print(x.item(), *place, "OMPI_COMM_WORLD_RANK" in os.environ, sys.argv[1:])
    dist.destroy_process_group()
"""


def program(tmp_path, name):
    """A folder for ``PATH`` in which mpirun is that of one implementation: several may be installed."""
    folder = tmp_path / "bin"
    folder.mkdir(exist_ok=True)
    (folder / "mpirun").write_text(f'#!/bin/sh\nexec {name} "$@"\n')
    (folder / "mpirun").chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def start(tmp_path, script, launcher, *options, environment, arguments=()):
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    return Launcher(
        tmp_path, script, "-H", "hosts", "--force_multi", "--launcher", launcher, f"--master_port={free_port()}",
        *options, environment=environment, arguments=arguments,
    )  # fmt: skip


@needs_program("mpirun.openmpi")
def test_openmpi_starts_the_ranks(tmp_path):
    environment = {**OPENMPI, **program(tmp_path, "mpirun.openmpi")}
    launcher = start(tmp_path, SUM, "openmpi", "--no_local_rank", environment=environment, arguments=("a b",))
    code, out, err = launcher.finish()
    assert code == 0, err
    assert sorted(out.splitlines()) == [f"[rank {rank}] 3.0 {rank} 2 0 True ['a b']" for rank in range(2)]


@needs_program("mpirun.openmpi")
def test_a_failure_under_openmpi_is_reported_once_as_on_one_machine(tmp_path):
    script = """
        import pathlib
        pathlib.Path(f"up{rank}").touch()
        while not pathlib.Path(f"up{1 - rank}").exists(): time.sleep(0.02)
        time.sleep(0.7)
        if rank == 1: raise ValueError("the cause")
        time.sleep(300)
    """
    launcher = start(tmp_path, script, "openmpi", environment={**OPENMPI, **program(tmp_path, "mpirun.openmpi")})
    code, _, err = launcher.finish()
    assert code == 1
    (line,) = [line for line in err.splitlines() if "failed first" in line]
    assert re.search(
        r"deepspeed: rank 1 \(local rank 1, pid \d+\) failed first on host .*: ValueError: the cause", line
    )
    assert err.count("Traceback") == 1
    wait_until(lambda: not launcher.processes(), 100, "end of all processes")


@needs_program("mpirun.openmpi")
def test_stopping_the_command_stops_openmpi_and_its_ranks(tmp_path):
    script = "import pathlib; pathlib.Path(f'up{rank}').touch(); time.sleep(300)"
    launcher = start(tmp_path, script, "openmpi", environment={**OPENMPI, **program(tmp_path, "mpirun.openmpi")})
    launcher.wait_for_files("up0", "up1")
    launcher.process.terminate()
    assert launcher.finish()[0] == 143
    wait_until(lambda: not launcher.processes(), 100, "end of all processes")


@needs_program("mpirun.openmpi")
def test_a_plain_mpirun_line_is_found_by_init_distributed(tmp_path):
    path = tmp_path / "plain.py"
    path.write_text(
        "import torch, deepspeed\ndeepspeed.init_distributed()\n"
        # One write: mpirun passes on what it reads, and where output is unbuffered the end of a line comes by itself.
        "x = torch.ones(1); deepspeed.comm.all_reduce(x); print(f'{x.item()}\\n', end='')\n"
        "deepspeed.comm.destroy_process_group()\n"
    )
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment |= {**OPENMPI, "DS_ACCELERATOR": "cpu", "MASTER_PORT": str(free_port())}
    done = subprocess.run(
        ["mpirun.openmpi", "-n", "2", sys.executable, str(path)],
        env={**environment, "PYTHONPATH": str(Path(__file__).parents[2])},
        cwd=tmp_path, capture_output=True, text=True, timeout=150,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["2.0", "2.0"] and "found by Open MPI variables" in done.stderr


@needs_program("mpirun.openmpi")
@pytest.mark.slow
def test_mpirun_at_the_port_of_another_run_names_that_run(tmp_path):
    script = """
        import pathlib, torch, deepspeed.comm as dist
        dist.init_distributed()
        pathlib.Path(f"met{rank}").touch()
        while not pathlib.Path("go").exists(): time.sleep(0.02)
        dist.barrier()
    """
    port = str(free_port())
    launcher = Launcher(tmp_path, script, "--num_gpus=2", f"--master_port={port}")
    launcher.wait_for_files("met0", "met1", timeout=150)
    other = tmp_path / "other.py"
    other.write_text("import deepspeed\ndeepspeed.init_distributed()\n")
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment |= {**OPENMPI, "DS_ACCELERATOR": "cpu", "MASTER_PORT": port}
    done = subprocess.run(
        ["mpirun.openmpi", "-n", "2", sys.executable, str(other)],
        env={**environment, "PYTHONPATH": str(Path(__file__).parents[2])},
        cwd=tmp_path, capture_output=True, text=True, timeout=150,
    )  # fmt: skip
    (tmp_path / "go").touch()
    assert launcher.finish()[0] == 0 and done.returncode != 0
    assert "job.py" in done.stderr and ("the port is held by process" in done.stderr or "met already" in done.stderr)


@needs_program("mpirun.mpich")
@pytest.mark.parametrize(
    "launcher",
    # The others are of the same family, and the program here is MPICH's in each case.
    ["mpich", pytest.param("impi", marks=pytest.mark.slow), pytest.param("mvapich", marks=pytest.mark.slow)],
)
def test_hydra_starts_the_ranks(tmp_path, launcher):
    environment = {**program(tmp_path, "mpirun.mpich"), "HYDRA_LAUNCHER": "fork"}
    code, out, err = start(tmp_path, SUM, launcher, environment=environment).finish()
    assert code == 0, err
    assert sorted(out.splitlines()) == [
        f"[rank {rank}] 3.0 {rank} 2 0 False ['--local_rank={rank}']" for rank in range(2)
    ]


@needs_program("pdsh")
def test_pdsh_starts_the_machines(tmp_path):
    """A real pdsh, over an ssh that stays on this machine."""
    programs = tmp_path / "bin"
    programs.mkdir()
    # pdsh calls: ssh options... host command
    (programs / "ssh").write_text('#!/bin/sh\nfor line; do :; done\nexec sh -c "$line"\n')
    (programs / "ssh").chmod(0o755)
    (tmp_path / "hosts").write_text("alpha slots=1\nbeta slots=1\n")
    script = """
        print(sys.argv[1:], flush=True)
        import pathlib
        pathlib.Path(f"up{rank}").touch()
        while rank == 0 or len(list(pathlib.Path(".").glob("up*"))) < 2: time.sleep(0.02)
        time.sleep(0.5); sys.exit(3)
    """
    launcher = Launcher(
        tmp_path, script, "-H", "hosts", "--no_ssh_check", "--master_addr=127.0.0.1", "--no_local_rank",
        f"--master_port={free_port()}", arguments=("a b", "100%", "%n", "%h"),
        environment={"PATH": f"{programs}:{os.environ['PATH']}"},
    )  # fmt: skip
    code, out, err = launcher.finish()
    assert code == 3, err
    assert sorted(line.partition(": ")[2] for line in out.splitlines()) == [
        f"[rank {rank}] ['a b', '100%', '%n', '%h']" for rank in range(2)
    ]
    assert err.count("failed first on host") == 1
    wait_until(lambda: not launcher.processes(), 100, "end of all processes")
