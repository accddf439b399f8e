"""Starting and adopting the process group, each in a process of its own."""

import os
import signal
import socket
import sys
import textwrap
import threading

import psutil
import pytest
import torch.distributed as torch_dist

from deepspeed.comm.base.environment import Place
from deepspeed.comm.start import process_group, supervised_start
from deepspeed.comm.start.process_group import choose_interface, interface_of, means_loopback
from deepspeed.comm.start.startup import RankInfo
from deepspeed.errors import CommunicationError
from deepspeed.ports import free_port
from tests.comm.processes import Job

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "DEEPSPEED_TIMEOUT")
PREFIXES = ("SLURM_", "OMPI_", "PMI_", "MPI_", "TORCHELASTIC_")


def start(code: str, **environ: str) -> Job:
    clean = {k: v for k, v in os.environ.items() if k not in VARIABLES and not k.startswith(PREFIXES)}
    clean.update(environ, OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu")
    return Job(textwrap.dedent(code), clean)


def run(code: str, **environ: str) -> tuple[str, str]:
    process = start(code, **environ)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out, err


def test_plain_python_twice_in_a_row():
    out, err = run(
        """
        for _ in range(2):
            dist.init_distributed()
            x = torch.ones(2)
            dist.all_reduce(x)
            assert x.tolist() == [1, 1] and dist.get_backend() == "gloo"
            dist.destroy_process_group()
        print(*(os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")), int(os.environ["MASTER_PORT"]) > 0)
        """
    )
    assert out.split() == ["0", "1", "0", "True"]
    assert err.count("process group started: 1 rank(s), backend gloo, found by plain python") == 1


def test_two_jobs_of_one_process_share_a_host_and_a_port_variable():
    code = "dist.init_distributed(); dist.barrier(); print('met')"
    jobs = [start(code, RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29500") for _ in range(2)]
    for job in jobs:
        out, err = job.communicate(timeout=120)
        assert (job.returncode, out.strip()) == (0, "met"), err


@pytest.mark.parametrize("way", ["torch", "slurm", "arguments"])
def test_two_ranks_meet(way):
    port = str(free_port())
    code = "dist.init_distributed()"
    environs = [
        {"RANK": str(r), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_RANK": str(r)}
        for r in range(2)
    ]
    if way == "slurm":
        environs = [
            {"SLURM_PROCID": str(r), "SLURM_NTASKS": "2", "SLURM_LOCALID": str(r), "SLURM_JOB_NODELIST": "localhost"}
            for r in range(2)
        ]
        code = f"dist.init_distributed(distributed_port={port})"
    if way == "arguments":
        environs = [{"WHO": str(r)} for r in range(2)]
        where = f"init_method='tcp://127.0.0.1:{port}'"
        code = f"dist.init_distributed('gloo', {where}, rank=int(os.environ['WHO']), world_size=2)"
    code += """
x = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(x)
print(x.item(), dist.get_rank(), os.environ["RANK"], os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"])
dist.destroy_process_group()
"""
    jobs = [start(code, **environ) for environ in environs]
    for rank, job in enumerate(jobs):
        out, err = job.communicate(timeout=120)
        assert job.returncode == 0, err
        assert out.split() == ["3.0", str(rank), str(rank), str(rank), "2"]
        assert ("process group started: 2 rank(s)" in err) == (rank == 0)


def test_an_existing_group_is_adopted():
    out, err = run(
        """
        td.init_process_group("gloo", store=td.HashStore(), rank=0, world_size=1)
        group = td.group.WORLD
        dist.init_distributed(dist_init_required=False)
        dist.init_distributed()
        assert td.group.WORLD is group
        print(os.environ["LOCAL_RANK"])
        """
    )
    assert out.strip() == "0"
    assert "process group adopted" in err


def test_a_start_that_failed_does_not_move_the_keys_of_the_next_one():
    """Ranks of which one has failed to start a group meet at the same keys afterwards."""
    run(
        """
        from datetime import timedelta
        try:
            td.init_process_group("gloo", store=td.HashStore(), rank=0, world_size=2, timeout=timedelta(milliseconds=1))
        except RuntimeError:
            assert not td.is_initialized()
        else:
            raise AssertionError("one rank of two was enough")
        dist.init_distributed()
        assert td.group.WORLD.group_name == "0"
        """
    )


def test_verbose_off_logs_nothing():
    _, err = run("dist.init_distributed(verbose=False)")
    assert err == ""


def test_the_calls_of_accelerate_and_lightning():
    limit = "__import__('datetime').timedelta(hours=1)"
    run(f"dist.init_distributed(dist_backend=None, auto_mpi_discovery=False, timeout={limit})")
    run("dist.init_distributed('gloo', distributed_port=1234, timeout=None)")


def test_time_out_of_the_environment():
    out, _ = run("print(dist.default_timeout().total_seconds())", DEEPSPEED_TIMEOUT="0.5")
    assert float(out) == 30
    _, err = run("print(dist.default_timeout().total_seconds())")
    job = start("dist.init_distributed()", DEEPSPEED_TIMEOUT="soon")
    _, err = job.communicate(timeout=120)
    assert job.returncode == 1
    assert "DEEPSPEED_TIMEOUT must be a number of minutes above 0, but is 'soon'" in err


@pytest.mark.parametrize("dies", [1, 2])
def test_a_rank_that_dies_before_the_group_is_started_is_named_by_the_others(dies):
    """Started by hand: no launcher ends the other ranks, and gloo would wait for the dead one for ten minutes."""
    code = f"""
        import signal, sys, time
        from deepspeed.comm.start import process_group
        from deepspeed.errors import CommunicationError
        def die(*_, **__):
            os.kill(os.getpid(), signal.SIGKILL)
        if os.environ["RANK"] == "{dies}":
            process_group.start_world_group = die
        started = time.monotonic()
        try:
            dist.init_distributed()
        except CommunicationError as error:
            print(time.monotonic() - started, error)
            sys.exit(3)
    """
    place = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    jobs = [start(code, RANK=str(rank), **place) for rank in range(3)]
    for rank, job in enumerate(jobs):
        out, err = job.communicate(timeout=120)
        if rank == dies:
            assert job.returncode == -signal.SIGKILL, err
            continue
        assert job.returncode == 3, err
        seconds, _, sentence = out.partition(" ")
        assert sentence.startswith(f"rank {dies} has ended after the rendezvous, before the process group was started")
        assert float(seconds) < 60, "imports of a busy machine included"


def test_a_rank_that_was_lost_on_another_machine_is_named():
    store = torch_dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set(supervised_start._LOST, "rank 7 has ended")
    blocks = threading.Event()
    try:
        with pytest.raises(CommunicationError, match="rank 7 has ended"):
            supervised_start.start_supervised(blocks.wait, store, {})
    finally:
        blocks.set()


def test_an_error_of_the_start_itself_stays_what_it_is():
    def fail():
        raise ValueError("no such backend")

    store = torch_dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(ValueError, match="no such backend"):
        supervised_start.start_supervised(fail, store, {})


def test_a_taken_port_is_named_with_a_free_one():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = str(server.getsockname()[1])
        job = start(
            "dist.init_distributed()",
            RANK="0",
            WORLD_SIZE="2",
            LOCAL_RANK="0",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
        )
        _, err = job.communicate(timeout=120)
    assert job.returncode == 1
    text = err.splitlines()[-1]
    assert f"cannot open 127.0.0.1:{port}, where the ranks were to meet: the port is held by " in text
    assert "Set MASTER_PORT to a free port, such as " in text and err.count("Traceback") == 1
    if sys.platform.startswith("linux"):
        assert f"process {os.getpid()} on host {socket.gethostname()} (`" in text


def test_a_program_that_takes_the_connection_and_sends_nothing_is_named():
    code = "import deepspeed.comm.start.rendezvous as r; r._REPLY_SECONDS = 0.5\ndist.init_distributed()"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        job = start(code, RANK="1", WORLD_SIZE="2", LOCAL_RANK="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        _, err = job.communicate(timeout=120)
    assert job.returncode == 1
    assert "and does not answer as rank 0 would. Set MASTER_PORT to a free port" in err.splitlines()[-1]


def test_two_runs_at_one_port_do_not_mix():
    """The stranger of the other run comes first, and would have been taken for rank 1."""
    code = """
        print(os.getpid())
        dist.init_distributed()
        x = torch.ones(1); dist.all_reduce(x); dist.barrier(); print(os.environ["DS_RUN_ID"])
        """
    rendezvous = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    stranger = start(code, RANK="1", LOCAL_RANK="1", DS_RUN_ID="other", **rendezvous)
    host = start(code, RANK="0", LOCAL_RANK="0", DS_RUN_ID="ours", **rendezvous)
    other_pid, reason = stranger.communicate(timeout=120)
    own = start(code, RANK="1", LOCAL_RANK="1", DS_RUN_ID="ours", **rendezvous)
    out, text = host.communicate(timeout=120)
    pid, *rest = out.split()
    assert (host.returncode, rest) == (0, ["ours"]), text
    assert own.communicate(timeout=120)[0].split()[1:] == ["ours"] and stranger.returncode == 1
    assert f"refused process {other_pid.strip()} on host" in text
    assert f"rendezvous of another run, that of process {pid} on host" in reason.splitlines()[-1]


@pytest.mark.parametrize(
    ("code", "environ", "words"),
    [
        ("dist.init_distributed()", {"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR is not set"),
        (
            "dist.init_distributed(dist_init_required=False)",
            {},
            "dist_init_required=False requires that the process group",
        ),
        (
            "import warnings; warnings.simplefilter('ignore'); dist.init_distributed('mpi')",
            {},
            "found 'mpi', which it was built without; leave dist_backend out, which stands for 'gloo' here",
        ),
        (
            "from datetime import timedelta; dist.init_distributed(timeout=timedelta(seconds=1))",
            {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "free"},
            "rank 1 of 2 did not connect to 127.0.0.1:",
        ),
        ("dist.get_local_rank()", {}, "LOCAL_RANK is not set; call deepspeed.init_distributed"),
    ],
)
def test_failures_are_sentences(code, environ, words):
    if environ.get("MASTER_PORT") == "free":
        environ = {**environ, "MASTER_PORT": str(free_port())}
    job = start(code, **environ)
    _, err = job.communicate(timeout=120)
    assert job.returncode == 1
    assert words in err.splitlines()[-1], err


@pytest.mark.parametrize("ranks", [(0, 0, 0), (0, 1, 0), (1, 0, 1)])
def test_a_process_whose_run_has_failed_starts_the_next_one(ranks):
    """A worker process of Ray runs one attempt after another, perhaps as another rank; the killed one comes anew."""
    where = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "DEEPSPEED_TIMEOUT": "1"}
    survivor = start(
        f"""
        from deepspeed.errors import CommunicationError
        for rank in {ranks}:
            os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
            dist.init_distributed()
            x = torch.ones(1)
            try:
                for _ in range(3):
                    dist.all_reduce(x)
                print("met", x.item())
            except CommunicationError as error:
                print("failed", flush=True)
        dist.destroy_process_group()
        """,
        **where,
    )
    dies = """
        dist.init_distributed()
        dist.all_reduce(torch.ones(1))
        os.kill(os.getpid(), 9)
    """
    lives = "dist.init_distributed(); [dist.all_reduce(torch.ones(1)) for _ in range(3)]; dist.destroy_process_group()"
    for code, rank in zip((dies, dies, lives), ranks, strict=True):
        other = str(1 - rank)
        start(code, RANK=other, LOCAL_RANK=other, **where).communicate(timeout=60)
    out, err = survivor.communicate(timeout=60)
    assert out.split() == ["failed", "failed", "met", "4.0"], err


@pytest.mark.parametrize("moment", ["start", "run"])
def test_a_failed_run_leaves_its_port(moment):
    """Whatever holds the process group still, here an error's traceback."""
    where = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "MOMENT": moment}
    survivor = start(
        """
        import socket
        from deepspeed.comm.start import process_group, supervised_start
        from deepspeed.errors import CommunicationError
        def fail(*arguments, **options):
            raise RuntimeError("Connection closed by peer")
        if os.environ["MOMENT"] == "start":
            process_group.start_world_group = fail
        try:
            dist.init_distributed()
            group = dist.get_world_group()
            for _ in range(3):
                dist.all_reduce(torch.ones(1))
        except CommunicationError as error:
            kept = error
        finally:
            dist.destroy_process_group()
        with socket.socket() as probe:
            print(probe.connect_ex(("127.0.0.1", int(os.environ["MASTER_PORT"]))) != 0)
        """,
        RANK="0",
        LOCAL_RANK="0",
        **where,
    )
    dies = """
        from deepspeed.comm.start import process_group, supervised_start
        die = lambda *arguments, **options: os.kill(os.getpid(), 9)
        if os.environ["MOMENT"] == "start":
            process_group.start_world_group = die
        dist.init_distributed()
        dist.all_reduce(torch.ones(1))
        die()
    """
    start(dies, RANK="1", LOCAL_RANK="1", **where).communicate(timeout=60)
    out, err = survivor.communicate(timeout=60)
    assert out.strip() == "True", err


ELSEWHERE = "192.0.2.7"


def facts(*hosts):
    return [RankInfo(host, 100 + rank, 0, "cpu", 0, "1", "gloo", *more) for rank, (host, *more) in enumerate(hosts)]


def place(rank):
    return Place(rank, 2, 0, "10.1.1.1", 29500, "test")


@pytest.fixture
def two_interfaces(monkeypatch):
    """A machine with the address 10.1.1.1 at ``eth7``, by which it reaches the others; its name means the loopback."""
    entry = type("Entry", (), {"address": "10.1.1.1"})
    loopback = type("Entry", (), {"address": "127.0.0.1"})
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"lo": [loopback], "eth7": [entry]})
    monkeypatch.setattr(process_group, "address_towards", lambda host: "10.1.1.1")
    monkeypatch.setattr(process_group, "means_loopback", lambda name: True)


def test_both_ends_take_the_interface_of_the_route_to_another_machine(two_interfaces):
    store = torch_dist.HashStore()
    for rank in (0, 1):
        environ = {}
        known = facts(("a", "10.1.1.1"), ("b", ELSEWHERE)) if rank == 0 else []
        choose_interface(environ, store, place(rank), known)
        assert environ == {"GLOO_SOCKET_IFNAME": "eth7"}


def test_nothing_is_set_on_one_machine_or_over_the_users_choice(two_interfaces):
    environ = {}
    choose_interface(environ, torch_dist.HashStore(), place(0), facts(("a", "127.0.0.1"), ("a", "127.0.0.1")))
    assert environ == {}
    environ = {"GLOO_SOCKET_IFNAME": "ib0"}
    choose_interface(environ, torch_dist.HashStore(), place(0), facts(("a", "10.1.1.1"), ("b", ELSEWHERE)))
    assert environ == {"GLOO_SOCKET_IFNAME": "ib0"}


def test_nothing_is_set_where_the_name_means_an_address_of_the_network(two_interfaces, monkeypatch):
    monkeypatch.setattr(process_group, "means_loopback", lambda name: False)
    environ = {}
    choose_interface(environ, torch_dist.HashStore(), place(0), facts(("a", "10.1.1.1"), ("b", ELSEWHERE)))
    assert environ == {}


@pytest.mark.parametrize(("named", "chosen"), [(("10.1.1.1", "fd77::2"), "eth7"), (("10.1.1.1", ""), None)])
def test_names_of_two_families_are_left_for_the_interface_on_all_machines(two_interfaces, monkeypatch, named, chosen):
    """Gloo refuses to connect an IPv4 address with an IPv6 address."""
    monkeypatch.setattr(process_group, "means_loopback", lambda name: False)
    store = torch_dist.HashStore()
    known = facts(("a", "10.1.1.1", named[0]), ("b", ELSEWHERE, named[1]))
    for rank in (0, 1):
        environ = {}
        choose_interface(environ, store, place(rank), known if rank == 0 else [])
        assert environ.get("GLOO_SOCKET_IFNAME") == chosen


def test_a_machine_without_a_route_is_named_with_what_to_set(two_interfaces, monkeypatch):
    monkeypatch.setattr(process_group, "address_towards", lambda host: None)
    warned = []
    monkeypatch.setattr(process_group, "log_dist", lambda line, ranks, level: warned.append((line, ranks)))
    environ = {}
    choose_interface(environ, torch_dist.HashStore(), place(0), facts(("a", "10.1.1.1"), ("b", ELSEWHERE)))
    assert environ == {} and "Set GLOO_SOCKET_IFNAME" in warned[0][0]
    assert warned[0][1] == [-1]  # each rank names itself


def test_names_as_gloo_takes_them(monkeypatch):
    def names(*addresses):
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, 0)) for each in addresses]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)

    names("127.0.1.1", "10.1.1.1")
    assert means_loopback("a")
    names("10.1.1.1", "127.0.1.1")
    assert not means_loopback("a")
    monkeypatch.undo()
    assert means_loopback("no-such-host.invalid")


def test_the_loopback_is_no_interface_for_others():
    assert interface_of("127.0.0.1") is None and interface_of("203.0.113.9") is None
