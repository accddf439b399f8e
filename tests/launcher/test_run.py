"""Runs of the launcher with real ranks: environment, arguments, output, failures."""

import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys

import pytest

from deepspeed.launcher.devices import usable_cores
from deepspeed.launcher.resources import encode_world_info
from deepspeed.ports import free_port
from tests.launcher.processes import Launcher

DUMP = "open(f'rank{rank}.json', 'w').write(__import__('json').dumps({'argv': sys.argv[1:], 'env': dict(os.environ)}))"


def dumped(folder, rank):
    return json.loads((folder / f"rank{rank}.json").read_text())


def run(folder, script, *options, timeout=150, **more):
    return Launcher(folder, script, *options, **more).finish(timeout)


def test_each_rank_finds_its_place(tmp_path):
    code, out, err = run(tmp_path, DUMP, "--num_gpus", "3", arguments=("--a", "-b", "--num_gpus", "9"))
    assert (code, out) == (0, ""), err
    for rank in range(3):
        seen = dumped(tmp_path, rank)
        assert seen["argv"] == [f"--local_rank={rank}", "--a", "-b", "--num_gpus", "9"]
        expected = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": 3,
            "LOCAL_SIZE": 3,
            "CROSS_RANK": 0,
            "CROSS_SIZE": 1,
        }
        assert {name: int(seen["env"][name]) for name in expected} == expected
        assert seen["env"]["MASTER_ADDR"] == "127.0.0.1"
        assert int(seen["env"]["MASTER_PORT"]) > 0
    assert len({dumped(tmp_path, rank)["env"]["MASTER_PORT"] for rank in range(3)}) == 1


def test_one_rank_on_the_cpu_by_default(tmp_path):
    code, out, err = run(tmp_path, "print('alone')", environment={"OMP_NUM_THREADS": None})
    assert (code, out) == (0, "alone\n")
    assert "--num_gpus N starts more" in err


def test_threads_are_shared_unless_set(tmp_path):
    cores = usable_cores()
    run(tmp_path, DUMP, "--num_gpus=2", environment={"OMP_NUM_THREADS": None})
    assert dumped(tmp_path, 1)["env"]["OMP_NUM_THREADS"] == str(max(1, cores // 2))
    run(tmp_path, DUMP, "--num_gpus=2", environment={"OMP_NUM_THREADS": "7"})
    assert dumped(tmp_path, 1)["env"]["OMP_NUM_THREADS"] == "7"


def test_options_about_the_script(tmp_path):
    run(tmp_path, DUMP, "--no_local_rank", arguments=("x",))
    assert dumped(tmp_path, 0)["argv"] == ["x"]
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "train.py").write_text("import sys; print(__name__, sys.argv[1:])")
    arguments = ["--module", "--hostfile", "None", "package.train", "y"]
    command = [sys.executable, "-m", "deepspeed.launcher.runner"]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [*command, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=150
    )
    assert done.stdout == "__main__ ['--local_rank=0', 'y']\n", done.stderr
    arguments = ["--no_python", "--no_local_rank", "--num_gpus=2", "sh", "-c", "echo from $RANK"]
    done = subprocess.run(
        [*command, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=150
    )
    assert sorted(done.stdout.splitlines()) == ["[rank 0] from 0", "[rank 1] from 1"], done.stderr


def test_include_and_exclude_choose_slots(tmp_path):
    run(tmp_path, DUMP, "--include", "localhost:0,2")
    assert dumped(tmp_path, 1)["env"]["WORLD_SIZE"] == "2"


def test_a_hostfile_with_this_machine_only(tmp_path):
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    code, _, err = run(tmp_path, DUMP, "-H", "hosts")
    assert code == 0, err
    assert dumped(tmp_path, 1)["env"]["WORLD_SIZE"] == "2"


def test_a_busy_port_is_avoided_and_a_free_one_kept(tmp_path):
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", 29500))
            listener.listen()
        except OSError:
            pass  # somebody else keeps it busy, which serves as well
        run(tmp_path, DUMP)
        assert dumped(tmp_path, 0)["env"]["MASTER_PORT"] != "29500"
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        port = listener.getsockname()[1]
        code, _, err = run(tmp_path, DUMP, "--num_gpus=1", f"--master_port={port}")
        assert code == 0 and f"--master_port {port}: the port is taken by process {os.getpid()}" in err
        assert dumped(tmp_path, 0)["env"]["MASTER_PORT"] != str(port)
    assert run(tmp_path, DUMP, f"--master_port={port}", "--master_addr=localhost")[0] == 0
    seen = dumped(tmp_path, 0)["env"]
    assert (seen["MASTER_ADDR"], seen["MASTER_PORT"]) == ("localhost", str(port))
    assert run(tmp_path, DUMP, environment={"MASTER_PORT": str(port)})[0] == 0
    assert dumped(tmp_path, 0)["env"]["MASTER_PORT"] == str(port)


_TAKES_THE_PORT = """
    import socket
    if rank == 0:
        thief = socket.socket()
        if sys.argv[1] == "this port":
            thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            thief.bind(("", int(os.environ["MASTER_PORT"])))
            thief.listen()
        except OSError:
            print("not taken", flush=True)
    import deepspeed, torch
    deepspeed.init_distributed()
    total = torch.ones(1)
    torch.distributed.all_reduce(total)
    print(f"sum {total.item():g} at {os.environ['MASTER_PORT']}", flush=True)
"""


@pytest.mark.parametrize(
    ("thief", "options"),
    [
        ("this port", ("--num_gpus=2",)),
        ("any port", ("--num_gpus=2",)),
        ("this port", ("--num_gpus=2", "--elastic_training")),  # the agent chooses the port of the ranks
    ],
)
def test_a_port_that_is_taken_after_the_launcher_looked(tmp_path, thief, options):
    port = free_port()
    command = (*options, f"--master_port={port}", "--no_local_rank")
    code, out, err = run(tmp_path, _TAKES_THE_PORT, *command, arguments=(thief,))
    assert code == 0, err
    (found,) = {int(number) for number in re.findall(r"sum 2 at (\d+)", out)}
    if thief == "any port":
        assert "not taken" in out and found == port
    else:
        assert re.search(r"port \d+ was free when the launcher chose it, and is now held by process \d+", err)
        assert f"meet at port {found} instead" in err


def test_the_environment_file_fills_what_is_not_set(tmp_path):
    (tmp_path / ".deepspeed_env").write_text("FROM_FILE=1\nSET_TWICE=file\n")
    (tmp_path / "other_env").write_text("FROM_OTHER=2\n")
    code, _, err = run(tmp_path, DUMP, environment={"SET_TWICE": "shell"})
    seen = dumped(tmp_path, 0)["env"]
    assert (seen["FROM_FILE"], seen["SET_TWICE"]) == ("1", "shell")
    assert "set from .deepspeed_env: FROM_FILE" in err
    run(tmp_path, DUMP, environment={"DS_ENV_FILE": "other_env"})
    seen = dumped(tmp_path, 0)["env"]
    assert seen["FROM_OTHER"] == "2" and "FROM_FILE" not in seen


def test_lines_are_whole_and_labeled(tmp_path):
    script = """
        for number in range(200):
            stream = sys.stdout if number % 2 else sys.stderr
            stream.write(f"rank{rank} "); stream.flush()
            stream.write(f"line {number} " + "x" * 100 + "\\n"); stream.flush()
    """
    code, out, err = run(tmp_path, script, "--num_gpus=3", "-q")
    assert code == 0
    for text in (out, err):
        lines = text.splitlines()
        assert len(lines) == 300
        for line in lines:
            assert re.fullmatch(r"\[rank (\d)\] rank\1 line \d+ x{100}", line), line
    for rank in range(3):
        assert re.findall(rf"\[rank {rank}\] .*? line (\d+)", out) == [str(n) for n in range(1, 200, 2)]


def test_output_is_live_and_progress_of_rank_0_passes(tmp_path):
    script = """
        import pathlib
        print("ready"); print("bar", end="\\r10%", file=sys.stderr, flush=True)
        while not pathlib.Path("go").exists(): time.sleep(0.02)
        print("\\r20%", file=sys.stderr)
    """
    launcher = Launcher(tmp_path, script, "--num_gpus=2", "-q")
    assert {launcher.process.stdout.readline() for _ in range(2)} == {"[rank 0] ready\n", "[rank 1] ready\n"}
    wanted = "[rank 0] 10%"
    assert launcher.process.stderr.read(len(wanted)) == wanted  # no end of line yet
    (tmp_path / "go").touch()
    code, _, err = launcher.finish()
    assert code == 0
    assert "\r[rank 0] 20%\n" in err or "\n[rank 0] 20%\n" in err
    assert err.count("[rank 1]") == 1 and "[rank 1] 20%\n" in err


def test_rank_0_reads_what_is_typed(tmp_path):
    script = "print('got', sys.stdin.readline().strip() or 'nothing')"
    launcher = Launcher(tmp_path, script, "--num_gpus=2", stdin=subprocess.PIPE)
    out, _ = launcher.process.communicate("words\n", timeout=150)
    assert sorted(out.splitlines()) == ["[rank 0] got words", "[rank 1] got nothing"]


def test_each_rank_has_a_log(tmp_path):
    run(tmp_path, "print('out'); print('err', file=sys.stderr)", "--num_gpus=2", "--enable_each_rank_log=logs/run")
    logs = sorted((tmp_path / "logs" / "run").iterdir())
    assert [path.name[14:] for path in logs] == ["_rank0.log", "_rank1.log"]
    assert sorted(logs[1].read_text().splitlines()) == ["err", "out"]


def test_lines_of_the_logger_name_date_and_rank_in_every_file(tmp_path):
    script = "from deepspeed.logging import log_dist; log_dist('ready', ranks=[-1])"
    _, _, err = run(tmp_path, script, "--num_gpus=2", "--enable_each_rank_log=logs")
    for rank, path in enumerate(sorted((tmp_path / "logs").iterdir())):
        line = rf"\[rank {rank}\] \[\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d\] \[INFO\] ready\n"
        assert re.fullmatch(line, path.read_text()) and path.read_text() in err
    assert re.search(r"^\[deepspeed\] \[\d{4}-.*\] \[INFO\] starting 2 of 2", err)
    _, _, err = run(tmp_path, script, "--num_gpus=2", environment={"DEEPSPEED_LOG_FORMAT": "json"})
    assert sorted(str(json.loads(line)["rank"]) for line in err.splitlines()) == ["0", "1", "None"]


def test_the_pid_file_exists_during_the_run(tmp_path):
    script = "print([name for name in os.listdir(os.environ['TMPDIR']) if name.endswith('.deepspeed')])"
    launcher = Launcher(tmp_path, script, "--save_pid", environment={"TMPDIR": str(tmp_path)})
    code, out, _ = launcher.finish()
    assert out == f"['{launcher.process.pid}.deepspeed']\n"
    assert not list(tmp_path.glob("*.deepspeed"))


def test_the_first_failure_is_shown_first_and_named_last(tmp_path):
    # Rank 2 fails; the others fail because of it, with longer tracebacks, and end sooner.
    script = """
        import pathlib
        def deep(n):
            return deep(n - 1) if n else lost()
        def lost():
            raise RuntimeError("Connection closed by peer [127.0.0.1]:1")
        def is_over(other):
            try:
                os.kill(int(pathlib.Path(f"pid{other}").read_text() or 0), 0)
            except (FileNotFoundError, ProcessLookupError) as error:
                return isinstance(error, ProcessLookupError)
        if rank == 2:
            try:
                raise ValueError("the cause")
            except ValueError:
                sys.excepthook(*sys.exc_info()); pathlib.Path("failed").touch()
                while not all(is_over(other) for other in (0, 1)): time.sleep(0.01)
                os._exit(5)
        pathlib.Path(f"pid{rank}").write_text(str(os.getpid()))
        while not pathlib.Path("failed").exists(): time.sleep(0.01)
        print("log line of", rank, file=sys.stderr)
        deep(10)
    """
    code, _, err = run(tmp_path, script, "--num_gpus=3", "-q")
    lines = err.splitlines()
    assert code == 5
    first = next(number for number, line in enumerate(lines) if "Traceback" in line)
    assert lines[first].startswith("[rank 2]")
    assert err.count("Traceback") == 1
    shown = next(number for number, line in enumerate(lines) if "ValueError: the cause" in line)
    for rank in (0, 1):
        (short,) = [
            n for n, line in enumerate(lines) if line.startswith(f"[rank {rank}] RuntimeError: Connection closed")
        ]
        assert short > shown and "in lost" in lines[short] and "stopped after the failure above" in lines[short]
        assert f"[rank {rank}] log line of {rank}" in lines
    assert re.fullmatch(
        rf"deepspeed: rank 2 \(local rank 2, pid \d+\) failed first on host {re.escape(socket.gethostname())}: "
        r"ValueError: the cause \(job.py:\d+ in <module>\)",
        lines[-2],
    )
    assert lines[-1] == "deepspeed: exit code 5; the other ranks (2) were stopped"


def test_a_rank_that_fails_beside_a_collective(tmp_path):
    script = """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        for step in range(20):
            if rank == 1 and step == 10: raise ValueError("bad batch")
            dist.all_reduce(torch.ones(8))
    """
    code, _, err = run(tmp_path, script, "--num_gpus=3", "-q")
    lines = err.splitlines()
    assert code in (1, 134)  # a process group that nobody destroyed may abort the interpreter's end
    assert next(line for line in lines if "Traceback" in line).startswith("[rank 1] Traceback")
    assert err.count("Traceback") == 1
    assert "rank 1 (local rank 1" in lines[-2] and "ValueError: bad batch (job.py:" in lines[-2]
    assert lines[-1] == f"deepspeed: exit code {code}; the other ranks (2) were stopped"


@pytest.mark.slow
def test_ranks_that_die_slowly_keep_their_tracebacks_held(tmp_path):
    script = """
        import atexit, time
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        atexit.register(time.sleep, 6)  # as the end of a process on a busy machine; longer than HOLD_SECONDS
        atexit.register(dist.destroy_process_group)  # runs first: the others notice while this rank is ending
        dist.all_reduce(torch.ones(8))
        if rank == 1: raise ValueError("bad batch")
        dist.all_reduce(torch.ones(8))
    """
    code, _, err = run(tmp_path, script, "--num_gpus=3", "-q")
    assert code == 1 and err.count("Traceback") == 1 and "ValueError: bad batch" in err


@pytest.mark.parametrize("closed", [(0, 1, 2), (1,)])
def test_closed_standard_streams_do_no_harm(closed, tmp_path):
    script = "import pathlib; print('lost'); pathlib.Path(f'ran{rank}').touch()"
    launcher = Launcher(tmp_path, script, "--num_gpus=2", preexec_fn=lambda: [os.close(end) for end in closed])
    assert launcher.process.wait(timeout=150) == 0
    assert (tmp_path / "ran0").exists() and (tmp_path / "ran1").exists()


def test_descriptors_above_1024_do_no_harm(tmp_path):
    """So many does a launcher have with 256 ranks."""

    def open_many():
        resource.setrlimit(resource.RLIMIT_NOFILE, (2048, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        for number in range(3, 1100):
            os.dup2(0, number)

    script = "sys.exit('no') if rank else time.sleep(300)"
    launcher = Launcher(tmp_path, script, "--num_gpus=2", "-q", preexec_fn=open_many, close_fds=False)
    code, _, err = launcher.finish()
    assert code == 1 and "rank 1" in err.splitlines()[-2] and "Traceback" not in err
    assert not launcher.processes()


def test_a_full_log_of_a_rank_does_not_end_it(tmp_path):
    def limit_files():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))

    script = "print('x' * 1500, flush=True); time.sleep(0.1); print('end')"
    launcher = Launcher(tmp_path, script, "--num_gpus=1", "--enable_each_rank_log=logs", preexec_fn=limit_files)
    code, out, err = launcher.finish()
    assert code == 0 and out.endswith("x\nend\n")
    assert "cannot write: File too large; it ends here, the ranks continue" in err


def test_a_program_that_is_not_there(tmp_path):
    (tmp_path / "x").touch()
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--no_python", "--num_gpus=2", "no-such-program"]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 127
    assert "rank 0" in done.stderr and "no-such-program: No such file or directory" in done.stderr


def test_the_node_launcher_alone(tmp_path):
    world = encode_world_info({"a": [0], "b": [0, 1]})
    launcher = Launcher(
        tmp_path, DUMP, f"--world_info={world}", "--node_rank=1", "--master_addr=a.invalid", "--master_port=4321",
        module="deepspeed.launcher.launch",
    )  # fmt: skip
    assert launcher.finish()[0] == 0
    seen = dumped(tmp_path, 2)["env"]
    expected = {
        "RANK": "2", "LOCAL_RANK": "1", "WORLD_SIZE": "3", "LOCAL_SIZE": "2", "CROSS_RANK": "1", "CROSS_SIZE": "2",
        "MASTER_ADDR": "a.invalid", "MASTER_PORT": "4321",
    }  # fmt: skip
    assert {name: seen[name] for name in expected} == expected


def test_on_a_terminal_lines_end_properly_and_width_is_passed_on(tmp_path):
    import pty

    main_end, terminal = pty.openpty()
    import fcntl
    import struct
    import termios

    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 90, 0, 0))
    script = """
        import pathlib
        print(os.environ["COLUMNS"], sys.stdout.isatty())
        sys.stderr.write("\\r50%"); sys.stderr.flush(); pathlib.Path(f"bar{rank}").touch()
        while not pathlib.Path("bar0").exists(): time.sleep(0.01)
        time.sleep(0.2)
        if rank == 1: print("one", flush=True); pathlib.Path("one").touch()
        while not pathlib.Path("one").exists(): time.sleep(0.01)
        time.sleep(0.5)
    """
    launcher = Launcher(
        tmp_path, script, "--num_gpus=2", "-q", environment={"COLUMNS": None}, stdout=terminal, stderr=terminal
    )
    os.close(terminal)
    shown = b""
    while True:
        try:
            data = os.read(main_end, 4096)
        except OSError:  # the terminal's last user has gone
            break
        if not data:
            break
        shown += data
    os.close(main_end)
    assert launcher.process.wait(timeout=150) == 0
    assert b"[rank 0] 81 False\r\n" in shown
    assert b"\r\x1b[K[rank 1] one\r\n[rank 0] 50%" in shown
