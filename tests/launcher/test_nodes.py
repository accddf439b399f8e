"""Two machines, both this one: launchers with node ranks that find each other over the loopback."""

import contextlib
import os
import re
import signal
import socket
import time

import psutil
import pytest

from deepspeed.ports import free_port
from tests.launcher.processes import Launcher, wait_until

pytestmark = pytest.mark.timeout(150)

HOST = re.escape(socket.gethostname())


def start(folder, script, port=None, ranks=(2, 2), **more):
    """One launcher per machine, over the same script."""
    port = port or free_port()
    common = ("--no_ssh", f"--num_nodes={len(ranks)}", "--master_addr=127.0.0.1", f"--master_port={port}")
    return [
        Launcher(folder, script, *common, f"--node_rank={node}", f"--num_gpus={count}", **more)
        for node, count in enumerate(ranks)
    ]


def lose_all(node):
    """A machine that loses its power: none of its processes sees another one end."""
    processes = node.processes()
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for process in processes:
            with contextlib.suppress(ProcessLookupError):  # some end with their parent
                os.kill(process.pid, number)


def wait_until_linked(nodes):
    """Until the launcher of the second machine has found the first one's."""

    def ends(node):
        found = set()
        for process in node.processes():
            with contextlib.suppress(psutil.Error):
                for connection in process.net_connections("tcp"):
                    if connection.status == psutil.CONN_ESTABLISHED and connection.raddr:
                        found.add((connection.laddr.port, connection.raddr.port))
        return found

    wait_until(lambda: ends(nodes[0]) & {(there, here) for here, there in ends(nodes[1])}, 120, "link of the launchers")
    time.sleep(2.0)  # the greeting, which nothing shows


def test_a_dead_rank_ends_both_and_is_named_on_both(tmp_path):
    script = """
        import pathlib
        pathlib.Path(f"up{rank}").touch()
        while rank != 3 or len(list(pathlib.Path(".").glob("up*"))) < 4: time.sleep(0.05)
        time.sleep(0.5)
        try:
            raise ValueError("the cause")
        except ValueError:
            sys.excepthook(*sys.exc_info()); sys.stderr.flush(); os._exit(5)
    """
    nodes = start(tmp_path, script)
    nodes[0].wait_for_files("up0", "up1", "up2", "up3")
    (code0, _, err0), (code1, _, err1) = [node.finish() for node in nodes]
    assert (code0, code1) == (5, 5)
    text = rf"deepspeed: rank 3 \(local rank 1, pid \d+\) failed first on host {HOST}: ValueError: the cause"
    assert re.match(text, err1.splitlines()[-2]) and re.match(text, err0.splitlines()[-2])
    assert err1.splitlines()[-1] == "deepspeed: exit code 5; the other ranks (1) were stopped"
    assert re.match(rf"deepspeed: exit code 5; the ranks of host {HOST} \(2\) were stopped", err0.splitlines()[-1])
    assert "Traceback" in err1 and "Traceback" not in err0


@pytest.mark.parametrize("lost", [0, 1])
def test_a_machine_that_is_lost_is_named_by_the_other(tmp_path, lost):
    """kill -9 of one launcher with all its children; its rank sleeps, or is in the middle of a collective."""
    script = """
        import pathlib
        pathlib.Path(f"up{rank}").touch()
        time.sleep(300)
    """
    if lost == 1:
        script = """
            import pathlib, torch, deepspeed.comm as dist
            dist.init_distributed()
            x = torch.tensor([rank + 1.0]); dist.all_reduce(x)
            print(x.item(), os.environ["LOCAL_RANK"], os.environ["CROSS_RANK"], os.environ["CROSS_SIZE"])
            while True:
                dist.all_reduce(torch.ones(8)); pathlib.Path(f"up{rank}").touch(); time.sleep(0.01)
        """
    nodes = start(tmp_path, script, ranks=(1, 1))
    nodes[0].wait_for_files("up0", "up1")
    wait_until_linked(nodes)
    lose_all(nodes[lost])
    code, out, err = nodes[1 - lost].finish()
    assert code == 1
    first, second = err.splitlines()[-2:]
    assert re.match(rf"deepspeed: node {lost} \(rank {lost}, host {HOST}\) was lost: the connection to its", first), err
    assert re.match(rf"deepspeed: exit code 1; the ranks of host {HOST} \(1\) were stopped", second)
    assert "Traceback" not in err  # what the rank printed about its broken connection is one line
    assert not nodes[1 - lost].processes() and not nodes[lost].processes()
    text = nodes[lost].finish()
    if lost == 1:
        assert (out, text[1]) == ("[rank 0] 3.0 0 0 2\n", "[rank 1] 3.0 0 1 2\n")
        assert "starting 1 of 2 rank(s) (rank 1, node 1 of 2)" in text[2]
        assert "found by RANK and WORLD_SIZE" in err
        places = rf"rank map: 2 rank\(s\) on 1 host\(s\).*\n.* {HOST}: rank 0 \(local 0, pid \d+\), 1 \("
        assert re.search(places, err)


@pytest.mark.slow
def test_a_rank_with_the_pid_of_one_that_another_machine_lost_is_not_ended(tmp_path):
    script = """
        from deepspeed.exit_notes import ExitNotes
        notes = ExitNotes.here()
        notes.continues()
        notes.recovered([os.getpid()])  # the number of a process that was lost elsewhere
        time.sleep(8)  # longer than a rank may take that the others continue without
    """
    nodes = start(tmp_path, script)
    assert [node.finish()[0] for node in nodes] == [0, 0]


def test_a_stopped_launcher_stops_the_others(tmp_path):
    nodes = start(tmp_path, "import pathlib; pathlib.Path(f'up{rank}').touch(); time.sleep(300)")
    nodes[0].wait_for_files("up0", "up1", "up2", "up3")
    wait_until_linked(nodes)
    nodes[1].process.terminate()
    (code0, _, err0), (code1, _, err1) = [node.finish() for node in nodes]
    assert (code0, code1) == (143, 143)
    assert f"the launcher on host {socket.gethostname()} was stopped by signal 15 (SIGTERM)" in err0
    assert "no process of the 2 rank(s) is left" in err1


def test_the_first_waits_for_the_last_and_learns_of_a_late_failure(tmp_path):
    script = """
        import pathlib
        pathlib.Path(f"up{rank}").touch()
        while rank > 1 and not pathlib.Path("end").exists(): time.sleep(0.05)
        time.sleep((0, 0, 0, 300)[rank]); sys.exit((0, 0, 2, 0)[rank])
    """
    nodes = start(tmp_path, script)
    nodes[1].wait_for_files("up2", "up3")
    wait_until(lambda: len(nodes[0].processes()) == 1, 60, "end of the first machine's ranks")
    hub = psutil.Process(nodes[0].process.pid)
    sleeps = hub.num_ctx_switches().voluntary
    time.sleep(2)
    assert hub.num_ctx_switches().voluntary > sleeps + 10, "the launcher spins while it waits for the other machine"
    (tmp_path / "end").touch()
    assert [node.finish()[0] for node in nodes] == [2, 2]


def test_a_failure_before_the_other_launcher_has_started_still_reaches_it(tmp_path):
    port = free_port()
    late = ("--no_ssh", "--num_nodes=2", "--master_addr=127.0.0.1", f"--master_port={port}", "--num_gpus=1")
    early = Launcher(tmp_path, "time.sleep(300) if rank == 0 else sys.exit(7)", *late, "--node_rank=1")
    time.sleep(1.5)
    hub = Launcher(tmp_path, "time.sleep(300) if rank == 0 else sys.exit(7)", *late, "--node_rank=0")
    assert [node.finish()[0] for node in (early, hub)] == [7, 7]


@pytest.mark.parametrize(
    ("ranks", "node_ranks", "text"),
    [
        ((1, 2), (0, 1), r"node 0\) counts \[1, 1\] ranks per node, host .* \(node 1\) \[2, 2\]"),
        pytest.param(
            (1, 1, 1),
            (0, 1, 1),
            r"--node_rank 1 is used twice: by node 1 \(rank 1, host .* and by host",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_launchers_that_do_not_belong_together_raise(tmp_path, ranks, node_ranks, text):
    port = free_port()
    nodes = []
    for node, count in zip(node_ranks, ranks, strict=True):
        options = (f"--num_nodes={max(len(ranks), 2)}", "--master_addr=127.0.0.1", f"--master_port={port}")
        nodes.append(
            Launcher(tmp_path, "time.sleep(300)", "--no_ssh", *options, f"--node_rank={node}", f"--num_gpus={count}")
        )
    for node in nodes:
        code, _, err = node.finish()
        assert code == 1 and re.search(text, err), err


@pytest.mark.slow
def test_suspended_launchers_are_not_taken_for_dead(tmp_path):
    nodes = start(tmp_path, "import pathlib; pathlib.Path(f'up{rank}').touch(); time.sleep(3)")
    nodes[0].wait_for_files("up0", "up3")
    nodes[1].process.send_signal(signal.SIGSTOP)
    time.sleep(1.5)
    nodes[1].process.send_signal(signal.SIGCONT)
    assert [node.finish()[0] for node in nodes] == [0, 0]


def stay_here(folder):
    """Makes an ssh that runs the line in a shell of this machine, and a file of two hosts; returns the environment."""
    programs = folder / "bin"
    programs.mkdir()
    (programs / "ssh").write_text(
        '#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done\nhost=$2; shift 2\n'
        '[ "$*" = "hostname -I" ] && { echo 127.0.0.1 10.0.0.1; exit; }\necho "to $host" >>log\n'
        # As with sshd, a signal to the program here does not reach the program there.
        '[ "$*" = true ] || exec setsid --wait sh -c "$*"\n'
    )
    (programs / "ssh").chmod(0o755)
    (folder / "hosts").write_text("alpha slots=1\nbeta slots=1\n")
    return {"PATH": f"{programs}:{os.environ['PATH']}", "SHELL": "/bin/sh"}


@pytest.mark.parametrize(
    ("number", "options"), [(signal.SIGTERM, ("--grace=60",)), (signal.SIGHUP, ("--signal=hup",))], ids=["term", "hup"]
)
def test_a_signal_reaches_the_ranks_of_every_machine(tmp_path, number, options):
    """They may take their time to save, and the command ends with their code."""
    script = f"""
        import pathlib, signal
        signals = []
        for each in (signal.SIGTERM, signal.SIGHUP): signal.signal(each, lambda number, frame: signals.append(number))
        pathlib.Path(f"up{{rank}}").touch()
        while not signals: time.sleep(0.01)
        pathlib.Path(f"told{{rank}}").touch()
        while len(list(pathlib.Path(".").glob("told*"))) < 2: time.sleep(0.01)
        sys.exit(75 if signals[0] == {int(number)} else 1)
    """
    launcher = Launcher(
        tmp_path, script, "-H", "hosts", "--launcher=ssh", f"--master_port={free_port()}", "--no_local_rank", *options,
        environment=stay_here(tmp_path),
    )  # fmt: skip
    launcher.wait_for_files("up0", "up1")
    launcher.process.send_signal(number)
    code, _, err = launcher.finish()
    assert code == 75, err
    assert "have saved and exited; start the same command again to resume" in err
    wait_until(lambda: not launcher.processes(), 100, "end of all processes")


def test_ssh_with_a_program_that_stays_here(tmp_path):
    """The whole way of ``--launcher ssh`` and its quoting; the ssh in PATH runs the line in a shell of this machine."""
    environment = stay_here(tmp_path)
    (tmp_path / ".deepspeed_env").write_text("FROM_FILE=it's 100%\n")
    script = """
        print(sys.argv[1:], os.environ['FROM_FILE'], flush=True)
        import pathlib
        pathlib.Path(f"up{rank}").touch()
        while rank == 0 or len(list(pathlib.Path(".").glob("up*"))) < 2: time.sleep(0.02)
        time.sleep(0.5); sys.exit(3)
    """
    launcher = Launcher(
        tmp_path, script, "-H", "hosts", "--launcher=ssh", f"--master_port={free_port()}", "--no_local_rank",
        arguments=("a b", "$HOME", "'q'", "%n"), environment=environment,
    )  # fmt: skip
    code, out, err = launcher.finish()
    assert code == 3, err
    text = "['a b', '$HOME', \"'q'\", '%n'] it's 100%"
    assert sorted(out.splitlines()) == [f"[rank 0] {text}", f"[rank 1] {text}"]
    assert sorted((tmp_path / "log").read_text().split("\n")) == ["", "to alpha", "to alpha", "to beta", "to beta"]
    assert err.count("failed first on host") == 1  # on a screen that all share, once
    assert "rank map: 2 rank(s) on 2 machine(s)" in err and "node 1, beta: rank 1 on slots 0" in err
    wait_until(lambda: not launcher.processes(), 100, "end of all processes")


def test_unreachable_machines_are_all_named(tmp_path):
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "ssh").write_text('#!/bin/sh\necho "no route" >&2\nexit 255\n')
    (programs / "ssh").chmod(0o755)
    (tmp_path / "hosts").write_text("alpha slots=1\nbeta slots=1\n")
    environment = {"PATH": f"{programs}:{os.environ['PATH']}"}
    code, _, err = Launcher(tmp_path, "", "-H", "hosts", "--launcher=ssh", environment=environment).finish()
    assert code == 1
    assert "no login by ssh without a password on alpha (no route); beta (no route)" in err


def test_the_first_logins_use_the_options_of_the_run(tmp_path):
    """A key or a jump host that ``--launcher_args`` names is needed by every login."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "ssh").write_text('#!/bin/sh\necho "$*" >>log\nexit 255\n')
    (programs / "ssh").chmod(0o755)
    (tmp_path / "hosts").write_text("alpha slots=1\nbeta slots=1\n")
    options = ("-H", "hosts", "--launcher=ssh", "--ssh_port=2222", "--launcher_args=-i 'my key' -J jump")
    for more in ((), ("--no_ssh_check",)):
        environment = {"PATH": f"{programs}:{os.environ['PATH']}"}
        assert Launcher(tmp_path, "", *options, *more, environment=environment).finish()[0] == 1
    lines = (tmp_path / "log").read_text().splitlines()
    assert len(lines) == 3 and all("-p 2222 -i my key -J jump -- " in line for line in lines)
    assert lines[2].endswith("-- alpha hostname -I")


def test_slurm_by_its_variables(tmp_path):
    """The whole way of ``--launcher slurm``: an srun that starts its tasks here, with the variables of two machines."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "srun").write_text(
        '#!/bin/sh\nwhile [ "${1#--}" != "$1" ]; do shift; done\n'
        "export SLURM_NTASKS=4 SLURM_STEP_NODELIST=localhost,node[7-9]\n"
        'for rank in 3 2 1 0; do SLURM_PROCID=$rank SLURM_LOCALID=$((rank % 2)) "$@" & all="$all $!"; done\n'
        "code=0; for task in $all; do wait $task || code=$?; done; exit $code\n"
    )
    (programs / "srun").chmod(0o755)
    (tmp_path / "hosts").write_text("alpha slots=2\nbeta slots=2\n")
    script = """
        names = ("LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "WORLD_SIZE", "MASTER_ADDR")
        print(*(os.environ[name] for name in names), flush=True)
        import pathlib
        pathlib.Path(f"up{rank}").touch()
        while rank != 2 or len(list(pathlib.Path(".").glob("up*"))) < 4: time.sleep(0.02)
        time.sleep(0.5); sys.exit(9)
    """
    options = ("-H", "hosts", "--launcher=slurm", f"--master_port={free_port()}")
    launcher = Launcher(tmp_path, script, *options, environment={"PATH": f"{programs}:{os.environ['PATH']}"})
    code, out, err = launcher.finish()
    assert code == 9, err
    assert sorted(out.splitlines()) == [f"[rank {r}] {r % 2} 2 {r // 2} 4 localhost" for r in range(4)]
    (line,) = [line for line in err.splitlines() if "failed first" in line]
    assert line.startswith("deepspeed: rank 2 (local rank 0, pid ")
    wait_until(lambda: not launcher.processes(), 100, "end of all processes")
