"""Finding one's place from the environment: pure, one environment per way of starting."""

import pytest

from deepspeed.comm.base.environment import Place, find_place, local_rank_of, run_of_adopted
from deepspeed.errors import CommunicationError

MEETING = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4000"}


def test_torchrun_variables():
    environ = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "x", **MEETING}
    assert find_place(environ) == Place(5, 8, 1, "10.0.0.1", 4000, "torchrun variables", "torchrun run x")


def test_default_port_without_master_port():
    environ = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "h"}
    assert find_place(environ).port == 29500
    assert find_place(environ, default_port=1234).port == 1234


def test_plain_python_is_one_process_on_any_port():
    place = find_place({})
    assert (place.rank, place.world_size, place.local_rank, place.address, place.port) == (0, 1, 0, "127.0.0.1", 0)
    environ: dict[str, str] = {}
    place.export(environ)
    assert environ["RANK"] == environ["LOCAL_RANK"] == "0"
    assert environ["WORLD_SIZE"] == "1"
    assert int(environ["MASTER_PORT"]) > 0


def test_only_local_rank_is_plain_python():
    assert find_place({"LOCAL_RANK": "0"}).world_size == 1
    assert find_place({"WORLD_SIZE": "1"}).rank == 0


SLURM = {
    "SLURM_PROCID": "6",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "2",
    "SLURM_JOB_NODELIST": "gpu[003-004]",
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "0",
}


def test_slurm():
    place = find_place(SLURM)
    assert place == Place(6, 8, 2, "gpu003", 15000 + 123456 % 15000, "Slurm variables", "Slurm step 123456.0")
    assert find_place({**SLURM, **MEETING}).address == "10.0.0.1"
    assert find_place({**SLURM, **MEETING}).port == 4000
    assert find_place(SLURM, default_port=777).port == 777


def test_slurm_step_counts_its_own_tasks():
    assert find_place({**SLURM, "SLURM_STEP_NUM_TASKS": "7"}).world_size == 7


def test_slurm_identity_with_a_given_master_address_and_world_size():
    assert find_place({**SLURM, **MEETING, "WORLD_SIZE": "8"}).rank == 6


@pytest.mark.parametrize("job_name", ["bash", "interactive"])
def test_by_hand_inside_a_slurm_shell_is_plain_python(job_name):
    assert find_place({**SLURM, "SLURM_JOB_NAME": job_name}).world_size == 1


def test_discovery_can_be_switched_off():
    assert find_place(SLURM, discover=False).world_size == 1


def test_torch_variables_win_over_slurm():
    assert find_place({**SLURM, "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", **MEETING}).world_size == 2


OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}


def test_open_mpi_queries_the_address_only_if_it_must():
    assert find_place(OPEN_MPI, mpi_address=lambda: "node7") == Place(3, 4, 1, "node7", 29500, "Open MPI variables")

    def never() -> str:
        raise AssertionError("asked MPI although the address was known")

    assert find_place({**OPEN_MPI, **MEETING}, mpi_address=never).address == "10.0.0.1"
    one_host = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
    assert find_place(one_host, mpi_address=never).address == "127.0.0.1"
    with pytest.raises(CommunicationError, match=r"rank 3 of 4 \(from Open MPI.*MASTER_ADDR is not set"):
        find_place(OPEN_MPI)


def test_jobs_of_open_mpi_rendezvous_at_ports_of_their_own():
    one_host = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
    ports = {find_place({**one_host, "PMIX_NAMESPACE": job}).port for job in ("305397761", "305397762", "prterun-a@1")}
    assert len(ports) == 3 and all(port and 15000 <= port < 30000 for port in ports)
    assert find_place({**one_host, "PMIX_NAMESPACE": "7", "MASTER_PORT": "4000"}).port == 4000
    assert find_place({**one_host, "PMIX_NAMESPACE": "7"}, default_port=777).port == 777


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
    environ = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", **MEETING, **environ}
    assert find_place(environ).run == run_of_adopted(environ) == run


def test_the_job_of_open_mpi_is_a_run():
    assert find_place({**OPEN_MPI, **MEETING, "PMIX_NAMESPACE": "7"}).run == "Open MPI job 7"
    assert find_place({**OPEN_MPI, **MEETING, "OMPI_MCA_ess_base_jobid": "8"}).run == "Open MPI job 8"


def test_pmi():
    environ = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    place = find_place(environ)
    assert (place.rank, place.world_size, place.local_rank, place.address) == (1, 2, 1, "127.0.0.1")


def test_mvapich():
    environ = {"MV2_COMM_WORLD_RANK": "3", "MV2_COMM_WORLD_SIZE": "4", "MV2_COMM_WORLD_LOCAL_RANK": "1"}
    place = find_place({**environ, "MV2_COMM_WORLD_LOCAL_SIZE": "2"}, mpi_address=lambda: "node0")
    assert (place.rank, place.world_size, place.local_rank, place.address) == (3, 4, 1, "node0")


def test_pmi_under_slurm():
    # srun with PMI: both say the same, Slurm knows more. mpiexec in an allocation: only PMI knows this process.
    assert find_place({**SLURM, "PMI_RANK": "6", "PMI_SIZE": "8"}).source == "Slurm variables"
    inherited = {**SLURM, "SLURM_PROCID": "0", "PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "3"}
    place = find_place(inherited)
    assert (place.rank, place.world_size, place.local_rank, place.address) == (3, 4, 3, "gpu003")


def test_arguments_win():
    environ = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", **MEETING}
    place = find_place(environ, rank=1, world_size=2)
    assert (place.rank, place.world_size, place.local_rank) == (1, 2, 1)
    assert find_place(environ, rank=1).world_size == 8
    place = find_place({}, rank=1, world_size=2, init_method="tcp://host:1")
    assert (place.address, place.port, place.local_rank) == (None, None, 1)


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


def test_tasks_that_are_the_ranks_keep_their_local_ranks():
    environ = {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NTASKS": "8", "MASTER_ADDR": "node0"}
    assert find_place(environ, rank=2, world_size=8, device_count=4).local_rank == 1
    assert find_place({**environ, "SLURM_NTASKS": "4", "SLURM_HET_SIZE": "2"}, rank=2, world_size=8).local_rank == 1


def test_local_rank_without_its_variable():
    environ = {"RANK": "5", "WORLD_SIZE": "8", **MEETING}
    assert find_place({**environ, "LOCAL_WORLD_SIZE": "4"}).local_rank == 1
    assert find_place(environ, device_count=4).local_rank == 1
    assert find_place({**environ, "MASTER_ADDR": "localhost"}).local_rank == 5
    with pytest.raises(CommunicationError, match="LOCAL_RANK is not set on rank 5 of 8.*Set LOCAL_RANK"):
        find_place(environ)


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}, "rank 1 of 2.*MASTER_ADDR is not set.*Set MASTER_ADDR"),
        ({"RANK": "1"}, r"RANK is set \(1\) but WORLD_SIZE is not.*torchrun"),
        ({"WORLD_SIZE": "4"}, r"WORLD_SIZE is set \(4\) but RANK is not.*torchrun"),
        ({"RANK": "2", "WORLD_SIZE": "2", **MEETING}, "rank 2 of 2.*0 to the number of processes minus 1"),
        ({"RANK": "-1", "WORLD_SIZE": "2", **MEETING}, "rank -1 of 2"),
        ({"RANK": "0", "WORLD_SIZE": "0", **MEETING}, "rank 0 of 0"),
        ({"RANK": "one", "WORLD_SIZE": "2", **MEETING}, "RANK must be a whole number, but is 'one'"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "h", "MASTER_PORT": "x"},
            "MASTER_PORT must be a whole number",
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "h", "MASTER_PORT": "0"},
            "MASTER_PORT is 0, which 2 ranks cannot use.*--standalone",
        ),
    ],
)
def test_errors_are_sentences(environ, words):
    with pytest.raises(CommunicationError, match=words):
        find_place(environ)


def test_half_of_the_arguments_is_an_error():
    with pytest.raises(CommunicationError, match="given rank= but not world_size="):
        find_place({}, rank=0)
    with pytest.raises(CommunicationError, match="given world_size= but not rank="):
        find_place({}, world_size=2)
