"""Ranks from the variables of MPI and Slurm, node lists, and cores."""

import os

import pytest

from deepspeed.errors import CommunicationError
from deepspeed.launcher import launch, launcher_helper
from deepspeed.launcher.devices import first_threads, parse_core_list, share_cores
from deepspeed.launcher.placing import PROGRAMS, LaunchedProcess, find_placed
from deepspeed.launcher.resources import LauncherError
from deepspeed.launcher.selection import hosts_of_step, slots_of_allocation
from tests.launcher.processes import Launcher

VARIABLES = {
    "openmpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "mpich": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    "impi": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    "mvapich": ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"),
    "slurm": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_each_program_sets_the_rank(program):
    environment = dict(zip(VARIABLES[program], ("5", "8", "1"), strict=True))
    assert find_placed(program, environment) == LaunchedProcess(5, 8, 1)
    with pytest.raises(LauncherError, match=f"this process was not started by {program}"):
        find_placed(program, {})
    with pytest.raises(LauncherError, match="expected a whole number, found .x."):
        find_placed(program, {**environment, VARIABLES[program][0]: "x"})


def place(program, rank, size, local, hosts):
    """The world that a launcher finds that ``program`` has started."""
    environment = dict(zip(VARIABLES[program], map(str, (rank, size, local)), strict=True))
    args = launch.parse_args([f"--placed_by={program}", "--master_addr=a", "x.py"])
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        return launch._world(args, hosts, 1)


def test_a_launcher_per_rank_finds_its_place():
    world = place("openmpi", 3, 5, 1, [[0, 1], [4, 6, 7]])
    assert world.places == [(3, 1)] and (world.node_rank, world.num_nodes, world.local_size) == (1, 2, 3)
    assert world.variables(3, 1)["WORLD_SIZE"] == "5"
    with pytest.raises(LauncherError, match="openmpi started 4 processes, but 5 were requested"):
        place("openmpi", 3, 4, 1, [[0, 1], [4, 6, 7]])
    with pytest.raises(LauncherError, match="made rank 1 number 0 of its machine, where number 1 was expected"):
        place("mpich", 1, 5, 0, [[0, 1], [4, 6, 7]])


def test_allocations():
    environment = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_STEP_NODELIST": "n2", "SLURM_NTASKS_PER_NODE": "3"}
    assert hosts_of_step(environment) == ["n2"]
    with pytest.raises(CommunicationError, match="node list 'n\\[1'"):
        slots_of_allocation({"SLURM_JOB_NODELIST": "n[1"}, 1)
    del environment["SLURM_STEP_NODELIST"]
    assert slots_of_allocation(environment, -1) == {"n1": 3, "n2": 3}
    assert slots_of_allocation({**environment, "SLURM_GPUS_PER_NODE": "h100:8"}, -1) == {"n1": 8, "n2": 8}
    assert slots_of_allocation(environment, 1) == {"n1": 1, "n2": 1}
    with pytest.raises(LauncherError, match="the number of ranks on each of 1 machine"):
        slots_of_allocation({"SLURM_JOB_NODELIST": "n1"}, -1)
    with pytest.raises(LauncherError, match="there is no Slurm job here"):
        hosts_of_step({})


def test_core_lists():
    assert parse_core_list("1,3-5") == [1, 3, 4, 5]
    for text in ("", "a", "3-1", "1-", "1,1"):
        with pytest.raises(LauncherError, match=f"--bind_core_list {text}"):
            parse_core_list(text)


def test_cores_are_shared_evenly(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert share_cores("1,3-5,7", 2) == [(1, 3), (4, 5)]
    with pytest.raises(LauncherError, match=r"2 ranks share 1 core\(s\)"):
        share_cores("1", 2)
    with pytest.raises(LauncherError, match=r"cores \[9\] are not among the usable"):
        share_cores("1,9", 1)
    for core in range(4):
        folder = tmp_path / f"cpu{core}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{core % 2},{core % 2 + 2}\n")
    assert first_threads([0, 1, 2, 3, 4], tmp_path) == [0, 1, 4]


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system does not bind processes to cores")
def test_ranks_are_bound(tmp_path):
    core = min(os.sched_getaffinity(0))
    script = "print(sorted(os.sched_getaffinity(0)), os.environ['OMP_NUM_THREADS'])"
    launcher = Launcher(
        tmp_path,
        script,
        "-q",
        f"--bind_core_list={core}",
        "--bind_cores_to_rank",
        environment={"OMP_NUM_THREADS": None},
    )
    assert launcher.finish()[:2] == (0, f"[{core}] 1\n")


def test_the_helper_becomes_the_script(tmp_path):
    environment = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "RANK": None}
    script = "print(*(os.environ[name] for name in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK')), sys.argv[1:])"
    helper = Launcher(
        tmp_path, script, arguments=("--x",), environment=environment, module="deepspeed.launcher.launcher_helper"
    )
    assert helper.finish() == (0, "1 2 0 ['--x']\n", "")
    with pytest.raises(ValueError, match="this process was not started by mpich"):
        launcher_helper.main(["--launcher=mpich", "x.py"])
