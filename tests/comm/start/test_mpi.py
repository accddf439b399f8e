"""Rank 0's host under MPI without mpi4py: asked of the process manager, or read from lists of hosts."""

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from deepspeed.comm.base.environment import find_place
from deepspeed.comm.start import mpi, mpi_query
from tests.harness.programs import needs_program
from tests.launcher.test_mpi import OPENMPI

QUERY = str(Path(mpi_query.__file__))


class ProcessManager:
    """MPICH's side of the PMI-1 protocol for ``size`` ranks, each over a socket."""

    def __init__(self, size: int) -> None:
        self.pairs = [socket.socketpair() for _ in range(size)]
        self.values: dict[str, str] = {}
        self.barrier = threading.Barrier(size)
        self.threads = [threading.Thread(target=self._serve, args=(ours,), daemon=True) for ours, _ in self.pairs]
        for thread in self.threads:
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        for line in connection.makefile("r"):
            words = dict(word.partition("=")[::2] for word in line.split())
            answer = {
                "init": "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0",
                "get_my_kvsname": "cmd=my_kvsname kvsname=kvs_1",
                "put": "cmd=put_result rc=0 msg=success",
                "barrier_in": "cmd=barrier_out",
                "finalize": "cmd=finalize_ack",
            }.get(words["cmd"])
            if words["cmd"] == "put":
                self.values[words["key"]] = words["value"]
            elif words["cmd"] == "get":
                found = self.values.get(words["key"])
                answer = "cmd=get_result rc=0 msg=success value=" + found if found else "cmd=get_result rc=-1 msg=none"
            elif words["cmd"] == "barrier_in":
                self.barrier.wait(60)
            connection.sendall(f"{answer}\n".encode())
            if words["cmd"] == "finalize":
                return


def test_pmi_hands_on_what_rank_0_publishes():
    manager = ProcessManager(3)
    found: list[str] = [""] * 3

    def ask(rank):
        found[rank] = mpi_query.query_pmi(manager.pairs[rank][1].fileno(), rank, f"host-{rank} 10.0.0.{rank}")

    threads = [threading.Thread(target=ask, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == ["host-0 10.0.0.0"] * 3


def test_an_error_of_the_manager_is_an_error():
    ours, theirs = socket.socketpair()
    ours.sendall(b"cmd=response_to_init rc=-1\n")
    with pytest.raises(OSError, match="answered 'cmd=response_to_init rc=-1'"):
        mpi_query.query_pmi(theirs.fileno(), 0, "x y")
    ours.close()
    with pytest.raises(OSError, match="no end of the line|Broken pipe"):
        mpi_query.query_pmi(theirs.fileno(), 0, "x y")


@needs_program("mpirun.openmpi")
@pytest.mark.parametrize("ranks", [1, 3])
def test_open_mpi_hands_on_what_rank_0_publishes(ranks):
    program = f'r=$PMIX_RANK; exec {sys.executable} -S {QUERY} "host-$r 10.0.0.$r "'
    done = subprocess.run(
        ["mpirun.openmpi", "-n", str(ranks), "sh", "-c", program],
        env={**os.environ, **OPENMPI}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout.split()) == (0, ["host-0", "10.0.0.0"] * ranks), done.stderr


@needs_program("mpirun.mpich")
def test_mpich_hands_on_what_rank_0_publishes():
    program = f'r=$PMI_RANK; exec {sys.executable} -S {QUERY} "host-$r 10.0.0.$r "'
    done = subprocess.run(
        ["mpirun.mpich", "-n", "2", "sh", "-c", program],
        env={**os.environ, "HYDRA_LAUNCHER": "fork"}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout.split()) == (0, ["host-0", "10.0.0.0"] * 2), done.stderr


def test_a_name_that_means_nothing_here_is_replaced_by_the_address():
    assert mpi.reachable("no-such-host.invalid 10.1.2.3") == "10.1.2.3"
    assert mpi.reachable("localhost 10.1.2.3") == "10.1.2.3"
    assert mpi.reachable("10.9.9.9 10.1.2.3\n") == "10.9.9.9"
    assert mpi.reachable("no-such-host.invalid ") == "no-such-host.invalid"
    assert mpi.reachable("") is None


def test_own_address_is_that_of_the_route_to_mpiruns_host():
    assert mpi.own_address({"OMPI_MCA_orte_hnp_uri": "7.0;tcp://127.0.0.1,127.0.0.2:5;tcp6://[::1]:6"}) == "127.0.0.1"
    address = mpi.own_address({})
    assert address == "" or socket.getaddrinfo(address, None)


def test_lists_of_hosts_are_the_last_resort(tmp_path):
    (tmp_path / "hosts").write_text("# hosts\n\nnode-a:4 slots=4\nnode-b slots=4\n")
    assert mpi.find_first_host({"OMPI_MCA_orte_default_hostfile": str(tmp_path / "hosts")}) == "node-a"
    assert mpi.find_first_host({"PBS_NODEFILE": str(tmp_path / "hosts")}) == "node-a"
    assert mpi.find_first_host({"LSB_HOSTS": "node-c node-c node-d"}) == "node-c"
    assert mpi.find_first_host({"PBS_NODEFILE": str(tmp_path / "nothing")}) is None


def test_a_manager_that_does_not_respond_leaves_the_rest(tmp_path, caplog):
    (tmp_path / "hosts").write_text("node-a\n")
    environ = {"PMI_FD": "98", "PMI_RANK": "0", "PBS_NODEFILE": str(tmp_path / "hosts")}
    with open(os.devnull) as null:
        os.dup2(null.fileno(), 98)
        try:
            assert mpi.find_first_host(environ) == "node-a"
        finally:
            os.close(98)


def test_the_place_uses_the_values_of_mpi():
    environ = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    environ |= {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "77"}
    place = find_place(environ, mpi_address=lambda: "10.0.0.7")
    assert (place.rank, place.address, place.port) == (2, "10.0.0.7", 15000 + 77)
