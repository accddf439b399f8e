"""Finding one's place from the environment: pure, one environment per way of starting."""

import pytest

from deepspeed.comm.base.environment import Place, find_place, local_rank_of, run_of_adopted
from deepspeed.errors import CommunicationError

MEETING = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4000"}
TORCH = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
SLURM = {
    "SLURM_PROCID": "6",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "2",
    "SLURM_JOB_NODELIST": "gpu[003-004]",
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "0",
}
INHERITED = {"SLURM_PROCID": "0", "PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "3"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
ONE_HOST = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
PMI = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
MVAPICH = {"MV2_COMM_WORLD_RANK": "3", "MV2_COMM_WORLD_SIZE": "4", "MV2_COMM_WORLD_LOCAL_RANK": "1"}
TASK = {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NTASKS": "8", "MASTER_ADDR": "node0"}


def never() -> str:
    raise AssertionError("asked MPI although the address was known")


def at(rank: int, world_size: int, local_rank: int, **more: object) -> dict[str, object]:
    return {"rank": rank, "world_size": world_size, "local_rank": local_rank, **more}


PLACES = [
    ({**TORCH, "MASTER_ADDR": "h"}, {}, {"port": 29500}),
    ({**TORCH, "MASTER_ADDR": "h"}, {"default_port": 1234}, {"port": 1234}),
    ({}, {}, at(0, 1, 0, address="127.0.0.1", port=0)),  # plain python, on any port
    ({"LOCAL_RANK": "0"}, {}, {"world_size": 1}),
    ({"WORLD_SIZE": "1"}, {}, {"rank": 0}),
    (SLURM, {}, at(6, 8, 2, address="gpu003", port=15000 + 123456 % 15000, run="Slurm step 123456.0")),
    ({**SLURM, **MEETING}, {}, {"address": "10.0.0.1", "port": 4000, "source": "Slurm variables"}),
    (SLURM, {"default_port": 777}, {"port": 777}),
    ({**SLURM, "SLURM_STEP_NUM_TASKS": "7"}, {}, {"world_size": 7}),  # a step counts its own tasks
    ({**SLURM, **MEETING, "WORLD_SIZE": "8"}, {}, {"rank": 6}),
    ({**SLURM, "SLURM_JOB_NAME": "bash"}, {}, {"world_size": 1}),  # by hand inside a shell
    ({**SLURM, "SLURM_JOB_NAME": "interactive"}, {}, {"world_size": 1}),
    (SLURM, {"discover": False}, {"world_size": 1}),
    ({**SLURM, **MEETING, "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}, {}, {"world_size": 2}),
    (OPEN_MPI, {"mpi_address": lambda: "node7"}, at(3, 4, 1, address="node7", port=29500, source="Open MPI variables")),
    ({**OPEN_MPI, **MEETING}, {"mpi_address": never}, {"address": "10.0.0.1"}),
    (ONE_HOST, {"mpi_address": never}, {"address": "127.0.0.1"}),
    ({**ONE_HOST, "PMIX_NAMESPACE": "7", "MASTER_PORT": "4000"}, {}, {"port": 4000}),
    ({**ONE_HOST, "PMIX_NAMESPACE": "7"}, {"default_port": 777}, {"port": 777}),
    ({**OPEN_MPI, **MEETING, "PMIX_NAMESPACE": "7"}, {}, {"run": "Open MPI job 7"}),
    ({**OPEN_MPI, **MEETING, "OMPI_MCA_ess_base_jobid": "8"}, {}, {"run": "Open MPI job 8"}),
    (PMI, {}, at(1, 2, 1, address="127.0.0.1")),
    ({**MVAPICH, "MV2_COMM_WORLD_LOCAL_SIZE": "2"}, {"mpi_address": lambda: "node0"}, at(3, 4, 1, address="node0")),
    # srun with PMI: both say the same, Slurm knows more. mpiexec in an allocation: only PMI knows this process.
    ({**SLURM, "PMI_RANK": "6", "PMI_SIZE": "8"}, {}, {"source": "Slurm variables"}),
    ({**SLURM, **INHERITED}, {}, at(3, 4, 3, address="gpu003")),
    ({**TORCH, **MEETING}, {"rank": 1, "world_size": 2}, at(1, 2, 1)),
    ({**TORCH, **MEETING}, {"rank": 1}, {"world_size": 8}),
    ({}, {"rank": 1, "world_size": 2, "init_method": "tcp://host:1"}, at(1, 2, 1, address=None, port=None)),
    # tasks that are the ranks keep their local ranks
    (TASK, {"rank": 2, "world_size": 8, "device_count": 4}, {"local_rank": 1}),
    ({**TASK, "SLURM_NTASKS": "4", "SLURM_HET_SIZE": "2"}, {"rank": 2, "world_size": 8}, {"local_rank": 1}),
    ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", **MEETING}, {}, {"local_rank": 1}),
    ({"RANK": "5", "WORLD_SIZE": "8", **MEETING}, {"device_count": 4}, {"local_rank": 1}),
    ({"RANK": "5", "WORLD_SIZE": "8", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}, {}, {"local_rank": 5}),
]


@pytest.mark.parametrize(("environ", "arguments", "expected"), PLACES)
def test_places(environ, arguments, expected):
    place = find_place(environ, **arguments)
    assert {name: getattr(place, name) for name in expected} == expected


def test_a_place_has_all_fields_and_exports_them():
    environ = {**TORCH, "TORCHELASTIC_RUN_ID": "x", **MEETING}
    assert find_place(environ) == Place(5, 8, 1, "10.0.0.1", 4000, "torchrun variables", "torchrun run x")
    exported: dict[str, str] = {}
    find_place({}).export(exported)
    assert [exported[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")] == ["0", "0", "1"]
    assert int(exported["MASTER_PORT"]) > 0


def test_jobs_of_open_mpi_rendezvous_at_ports_of_their_own():
    ports = {find_place({**ONE_HOST, "PMIX_NAMESPACE": job}).port for job in ("305397761", "305397762", "prterun-a@1")}
    assert len(ports) == 3 and all(port and 15000 <= port < 30000 for port in ports)


@pytest.mark.parametrize(
    ("environ", "run"),
    [
        ({"TORCHELASTIC_RUN_ID": "none"}, ""),  # what torchrun calls a run that has no name
        ({"TORCHELASTIC_RUN_ID": "none", "DS_RUN_ID": "x"}, "run x"),
        ({"TORCHELASTIC_RUN_ID": "y", "DS_RUN_ID": "x"}, "torchrun run y"),
        ({"DS_RUN_ID": "x", "SLURM_JOB_ID": "1", "SLURM_STEP_ID": "2"}, "run x"),  # a step may be one machine's
        ({}, ""),
    ],
)
def test_the_run_that_a_process_belongs_to(environ, run):
    environ = {**TORCH, **MEETING, **environ}
    assert find_place(environ).run == run_of_adopted(environ) == run


@pytest.mark.parametrize(
    "task",
    [
        {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "1"},
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        {"PMI_RANK": "0", "MPI_LOCALRANKID": "0", "PMI_SIZE": "1"},
    ],
)
def test_ranks_that_one_task_has_started_by_itself(task):
    """``torch.multiprocessing.spawn``: all ranks inherit the variables of the task."""
    environ = {**task, "MASTER_ADDR": "node0", "MASTER_PORT": "1"}
    places = [find_place(environ, rank=rank, world_size=4, device_count=4) for rank in range(4)]
    assert [place.local_rank for place in places] == [0, 1, 2, 3]
    assert [local_rank_of(environ, rank, 4, 4) for rank in range(4)] == [0, 1, 2, 3]
    assert find_place(environ, rank=3, world_size=4).local_rank == 0  # without devices it makes no difference


@pytest.mark.parametrize(
    ("environ", "arguments", "words"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}, {}, "rank 1 of 2.*MASTER_ADDR is not set.*Set MASTER_A"),
        ({"RANK": "1"}, {}, r"RANK is set \(1\) but WORLD_SIZE is not.*torchrun"),
        ({"WORLD_SIZE": "4"}, {}, r"WORLD_SIZE is set \(4\) but RANK is not.*torchrun"),
        ({"RANK": "2", "WORLD_SIZE": "2", **MEETING}, {}, "rank 2 of 2.*0 to the number of processes minus 1"),
        ({"RANK": "-1", "WORLD_SIZE": "2", **MEETING}, {}, "rank -1 of 2"),
        ({"RANK": "0", "WORLD_SIZE": "0", **MEETING}, {}, "rank 0 of 0"),
        ({"RANK": "one", "WORLD_SIZE": "2", **MEETING}, {}, "RANK must be a whole number, but is 'one'"),
        ({**TORCH, "MASTER_ADDR": "h", "MASTER_PORT": "x"}, {}, "MASTER_PORT must be a whole number"),
        ({**TORCH, "MASTER_ADDR": "h", "MASTER_PORT": "0"}, {}, "MASTER_PORT is 0, which 8 ranks cannot.*--standalone"),
        ({"RANK": "5", "WORLD_SIZE": "8", **MEETING}, {}, "LOCAL_RANK is not set on rank 5 of 8.*Set LOCAL_RANK"),
        (OPEN_MPI, {}, r"rank 3 of 4 \(from Open MPI.*MASTER_ADDR is not set"),
        ({}, {"rank": 0}, "given rank= but not world_size="),
        ({}, {"world_size": 2}, "given world_size= but not rank="),
    ],
)
def test_errors_are_sentences(environ, arguments, words):
    with pytest.raises(CommunicationError, match=words):
        find_place(environ, **arguments)
