"""Nothing that came from a run outlives it, whatever is killed and however the ranks' children behave."""

import fcntl
import os
import signal
import struct
import subprocess
import termios

import psutil
import pytest

from deepspeed.launcher import processes
from deepspeed.launcher.resources import encode_world_info
from deepspeed.ports import free_port
from tests.launcher.processes import Launcher, wait_until

LIMIT = 100.0  # seconds, far below what the scripts sleep

# Each rank has a child that ignores TERM and INT, a grandchild in a session of its own that does so too, and a
# grandchild whose parent is gone; then the rank itself waits, as in a collective.
FAMILY = """
    import signal, subprocess
    STUBBORN = "import signal, time\\nfor n in (15, 2, 1): signal.signal(n, signal.SIG_IGN)\\n"
    READY = "import pathlib; pathlib.Path({0!r}).touch()\\n"
    WAIT = "time.sleep(300)\\n"
    def start(name, **more):
        return subprocess.Popen([sys.executable, "-c", STUBBORN + READY.format(f"{name}{rank}") + WAIT], **more)
    start("child")
    start("session", start_new_session=True)
    orphan_maker = (
        "import subprocess, sys; "
        f"code = {STUBBORN + READY.format(f'orphan{rank}') + WAIT!r}; "
        "subprocess.Popen([sys.executable, '-c', code], start_new_session=True)"
    )
    subprocess.run([sys.executable, "-c", orphan_maker])
    import pathlib
    while not all(pathlib.Path(f"{name}{rank}").exists() for name in ("child", "session", "orphan")): time.sleep(0.02)
"""
WAITING = (
    FAMILY
    + """
    pathlib.Path(f"ready{rank}").touch()
    time.sleep(300)
"""
)
STUBBORN_RANK = """
    import pathlib, signal
    for number in (15, 2, 1): signal.signal(number, signal.SIG_IGN)
    pathlib.Path(f"ready{rank}").touch()
    time.sleep(300)
"""


@pytest.fixture
def launch(tmp_path):
    started = []

    def start(script, *options, **more):
        launcher = Launcher(tmp_path, script, *options, **more)
        started.append(launcher)
        return launcher

    # Under nohup the launcher inherits that hang-ups are ignored, and rightly keeps to it.
    inherited = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield start
    signal.signal(signal.SIGHUP, inherited)
    for launcher in started:
        launcher.kill_all()


def supervisor_of(launcher):
    (child,) = psutil.Process(launcher.process.pid).children()
    return child


def wait_until_output_is_stuck(launcher):
    """Waits until the launcher has filled the pipe of its output, which nobody reads.

    A pipe that has no room may hold less than its size, as a write that does not fit begins a new page.
    """
    pipe = launcher.process.stdout.fileno()
    size = fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ)

    def unread():
        return struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, b"\0" * 4))[0]

    wait_until(lambda: unread() > size // 2, LIMIT, "full pipe of output")


def all_have_ended(launcher):
    return wait_until(lambda: not launcher.processes(), LIMIT, "end of all processes")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL, signal.SIGHUP])
def test_a_signal_to_the_launcher(launch, number):
    launcher = launch(WAITING, "--num_gpus=2", "-q")
    launcher.wait_for_files("ready0", "ready1")
    assert len(launcher.processes()) == 2 + 2 * 4  # front, supervisor, and rank, child, session, orphan twice
    launcher.process.send_signal(number)
    all_have_ended(launcher)
    code, _, err = launcher.finish()
    if number == signal.SIGKILL:
        assert code == -signal.SIGKILL
    else:
        assert code == 128 + number
        assert err.splitlines()[-1].startswith(f"deepspeed: exit code {128 + number}")
        assert f"signal {int(number)} ({number.name})" in err.splitlines()[-2]


def test_a_second_interrupt_does_not_wait(launch):
    noting = STUBBORN_RANK.replace("signal.SIG_IGN", "lambda *_: pathlib.Path(f'told{rank}').touch()")
    world = encode_world_info({"here": [0, 1]})
    options = (f"--world_info={world}", "--node_rank=0", "--master_addr=127.0.0.1", f"--master_port={free_port()}")
    launcher = launch(noting, *options, "-q", "--grace=600", module="deepspeed.launcher.launch")
    launcher.wait_for_files("ready0", "ready1")
    launcher.process.send_signal(signal.SIGINT)
    launcher.wait_for_files("told0", "told1")  # two signals of one number that come together are one
    launcher.process.send_signal(signal.SIGINT)
    code, _, _ = launcher.finish()
    assert code == 130
    assert not launcher.processes()


def test_ranks_may_get_no_time_to_end(launch):
    script = STUBBORN_RANK.replace("signal.SIG_IGN", "lambda *_: (time.sleep(0.5), pathlib.Path('saved').touch())")
    launcher = launch(script, "--num_gpus=1", "-q", "--grace=0")
    launcher.wait_for_files("ready0")
    launcher.process.terminate()
    assert launcher.finish()[0] == 143
    assert not (launcher.folder / "saved").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_the_supervisor(launch, number):
    launcher = launch(WAITING, "--num_gpus=2", "-q")
    launcher.wait_for_files("ready0", "ready1")
    supervisor_of(launcher).send_signal(number)
    all_have_ended(launcher)
    code, _, err = launcher.finish()
    assert code == 128 + number, err


def rank_1_of(launcher):
    return next(
        process
        for process in supervisor_of(launcher).children()
        if process.environ().get("RANK") == "1" and "job.py" in str(process.cmdline())
    )


def test_the_launcher_killed_with_messages_that_it_has_not_read(launch):
    launcher = launch(WAITING, "--num_gpus=2", "-q")
    launcher.wait_for_files("ready0", "ready1")
    victim = rank_1_of(launcher)
    launcher.process.send_signal(signal.SIGSTOP)
    victim.kill()
    wait_until(lambda: not victim.is_running(), LIMIT, "end of rank 1")  # reaped, and so reported
    launcher.process.kill()
    all_have_ended(launcher)
    launcher.finish()


def test_a_process_of_another_user_stops_no_signal_to_the_rest(monkeypatch):
    reached = []

    def kill(pid, number):
        if pid == 1:
            raise PermissionError
        reached.append((pid, number))

    monkeypatch.setattr(os, "kill", kill)
    processes.send([1, 2], signal.SIGTERM)
    assert reached == [(2, signal.SIGTERM)]


def test_front_and_supervisor_killed_together(launch):
    launcher = launch(STUBBORN_RANK, "--num_gpus=2", "-q")
    launcher.wait_for_files("ready0", "ready1")
    supervisor = supervisor_of(launcher)
    launcher.process.send_signal(signal.SIGSTOP)
    supervisor.kill()
    launcher.process.kill()
    all_have_ended(launcher)
    launcher.finish()


def test_the_whole_process_group_killed(launch):
    launcher = launch(WAITING, "--num_gpus=2", "-q", start_new_session=True)
    launcher.wait_for_files("ready0", "ready1")
    os.killpg(launcher.process.pid, signal.SIGKILL)
    all_have_ended(launcher)
    launcher.finish()


def test_the_launcher_killed_while_nobody_reads_its_output(launch):
    script = STUBBORN_RANK.replace("time.sleep(300)", "while True: print('x' * 1000)")
    launcher = launch(script, "--num_gpus=2", "-q")
    launcher.wait_for_files("ready0", "ready1")
    wait_until_output_is_stuck(launcher)
    launcher.process.kill()
    all_have_ended(launcher)
    launcher.finish()


def test_the_launcher_terminated_while_nobody_reads_its_output(launch):
    launcher = launch("while True: print('x' * 1000)", "--num_gpus=2", "-q")
    wait_until_output_is_stuck(launcher)
    launcher.process.terminate()
    all_have_ended(launcher)
    code, _, err = launcher.finish()
    assert code == 143
    assert "exit code 143" in err.splitlines()[-1]


def test_a_reader_that_goes_away(launch):
    launcher = launch("while True: print('line', rank)", "--num_gpus=2", "-q")
    assert launcher.process.stdout.readline().startswith("[rank ")
    launcher.process.stdout.close()
    assert launcher.process.wait(timeout=150) == 128 + signal.SIGPIPE
    assert not launcher.processes()


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("raise ValueError('boom')", 1),
        ("os._exit(9)", 9),
        ("os.kill(os.getpid(), 9)", 137),
        ("os.kill(os.getpid(), 15)", 143),
    ],
)
def test_the_death_of_a_rank(launch, end, code):
    script = (
        FAMILY
        + f"""
    pathlib.Path(f"ready{{rank}}").touch()
    while not pathlib.Path("ready0").exists() or not pathlib.Path("ready1").exists(): time.sleep(0.02)
    if rank == 1: {end}
    time.sleep(300)
"""
    )
    launcher = launch(script, "--num_gpus=2", "-q")
    launcher.wait_for_files("ready0", "ready1")
    found, _, err = launcher.finish()
    assert found == code
    assert not launcher.processes()
    lines = err.splitlines()
    assert "rank 1 (local rank 1, pid" in lines[-2] and lines[-1].startswith(f"deepspeed: exit code {code};")


def test_what_a_finished_run_leaves_behind_is_ended(launch):
    launcher = launch(FAMILY, "--num_gpus=2", "-q")
    code, _, err = launcher.finish()
    assert code == 0
    assert not launcher.processes()
    assert err.splitlines()[-1] == "deepspeed: ended 6 process(es) that the ranks had left running"


def test_a_stopped_rank_is_ended_too(launch):
    launcher = launch(
        "import pathlib, signal\npathlib.Path(f'ready{rank}').touch()\nos.kill(os.getpid(), signal.SIGSTOP)", "-q"
    )
    launcher.wait_for_files("ready0")
    launcher.process.terminate()
    assert launcher.finish()[0] == 143
    assert not launcher.processes()


def test_nohup_survives_the_terminal(launch):
    launcher = launch(
        "import pathlib\npathlib.Path('ready').touch()\ntime.sleep(1)\nprint('done')",
        "-q",
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    launcher.wait_for_files("ready")
    launcher.process.send_signal(signal.SIGHUP)
    code, out, _ = launcher.finish()
    assert (code, out) == (0, "done\n")


def test_a_handler_may_finish_its_work(launch):
    script = """
        import pathlib, signal
        def save(*_):
            time.sleep(1); print("saved"); sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        pathlib.Path(f"ready{rank}").touch()
        time.sleep(300)
    """
    launcher = launch(script, "--num_gpus=2", "-q")
    launcher.wait_for_files("ready0", "ready1")
    launcher.process.terminate()
    code, out, _ = launcher.finish()
    assert code == 143
    assert sorted(out.splitlines()) == ["[rank 0] saved", "[rank 1] saved"]


def test_a_program_that_calls_the_launcher_keeps_its_own_children(launch, tmp_path):
    script = tmp_path / "caller.py"
    script.write_text(
        "import os, signal, subprocess, sys\n"
        "from deepspeed.launcher import runner\n"
        "mine = subprocess.Popen(['sleep', '300'])\n"
        "handler = signal.getsignal(signal.SIGTERM)\n"
        "try:\n"
        "    runner.main(['-q', '--no_python', '--no_local_rank', 'sh', '-c', 'kill -9 $PPID; sleep 300'])\n"
        "except SystemExit as stop:\n"
        "    print('code', stop.code)\n"
        "print(mine.poll(), signal.getsignal(signal.SIGTERM) is handler)\n"
        "mine.kill()\n"
    )
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [os.sys.executable, str(script)], capture_output=True, text=True, timeout=150, env=environment, cwd=tmp_path
    )
    assert done.stdout.splitlines() == ["code 137", "None True"], done.stderr


CONTINUING = """
    import pathlib, signal
    from deepspeed.exit_notes import ExitNotes
    notes = ExitNotes.here()
    notes.continues()
    pathlib.Path(f"pid{rank}").write_text(str(os.getpid()))
    other = pathlib.Path(f"pid{1 - rank}")
    while not other.exists() or not other.read_text(): time.sleep(0.02)
    other = int(other.read_text())
    pathlib.Path(f"ready{rank}").touch()
"""
"""Ranks of a run that continues without those that are lost, as elasticity.continue does."""


def test_a_rank_that_hangs_is_ended_where_the_run_continues_without_it(launch):
    script = (
        CONTINUING
        + """
    if rank == 1:
        for number in (15, 2, 1): signal.signal(number, signal.SIG_IGN)
        time.sleep(300)
    notes.recovered([other])
    """
    )
    launcher = launch(script, "--num_gpus=2", "-q")
    code, _, err = launcher.finish()
    assert code == 0, err
    assert "was lost: ended by signal 9 (SIGKILL)" in err and "the run continued without it" in err
    assert not launcher.processes()


@pytest.mark.parametrize(("continues", "code"), [(True, 0), (False, 137)])
def test_rank_0_is_killed_and_the_run_continues_or_does_not(launch, continues, code):
    """Where the others cannot continue, the code is that of the rank that was lost."""
    script = (
        CONTINUING
        + f"""
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    while notes.cause_of(other) == "": time.sleep(0.02)
    if {continues}:
        notes.recovered([other])
    sys.exit({int(not continues)})
    """
    )
    found, _, err = launch(script, "--num_gpus=2", "-q").finish()
    assert found == code, err
    assert ("the run continued without it" in err) is continues


def test_the_launcher_is_killed_while_ranks_could_continue(launch):
    launcher = launch(CONTINUING + "    time.sleep(300)", "--num_gpus=2", "-q")
    launcher.wait_for_files("ready0", "ready1")
    launcher.process.kill()
    all_have_ended(launcher)
    code, _, err = launcher.finish()
    assert code == -signal.SIGKILL
    assert f"the launcher (pid {launcher.process.pid}) was lost, perhaps killed, so its 2 rank(s) on " in err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "expected", "words"),
    [
        ("rank 0", 0, "was lost: ended by signal 9 (SIGKILL)"),
        ("launcher", -9, "was lost, perhaps killed, so its 3 rank(s) on "),
        ("supervisor", 137, "was stopped by signal 9 (SIGKILL)"),
    ],
)
def test_one_process_of_a_training_that_could_continue_is_killed(launch, victim, expected, words):
    """Training goes on without rank 0. Without a launcher it ends with one sentence."""
    script = f"""
        import pathlib, signal, torch
        import deepspeed
        from deepspeed.elasticity import ElasticSteps
        from tests.elasticity.program import make_config, make_data, make_model
        engine, *_ = deepspeed.initialize(model=make_model(), config=make_config(2))
        for step in ElasticSteps(engine, make_data(), 4):
            with step:
                for x, y in step:
                    engine.backward(torch.nn.functional.mse_loss(engine(x), y))
                    engine.step()
                if step.number == 2 and rank == 0:
                    if {victim == "rank 0"}:
                        os.kill(os.getpid(), signal.SIGKILL)
                    pathlib.Path("ready").touch()
                    time.sleep(300)
        assert engine.global_steps == 4
        pathlib.Path(f"trained{{rank}}").touch()
        """
    launcher = launch(script, "--num_gpus=3", "-q")
    if victim != "rank 0":
        launcher.wait_for_files("ready")
        (launcher.process if victim == "launcher" else supervisor_of(launcher)).kill()
    code, _, err = launcher.finish()
    assert (code, err.count(words)) == (expected, 1), err
    all_have_ended(launcher)
    assert len(list(launcher.folder.glob("trained*"))) == (2 if victim == "rank 0" else 0)


def test_ranks_that_hang_at_the_signal_of_the_scheduler_are_ended(launch):
    """They have the time of --grace."""
    launcher = launch(STUBBORN_RANK.replace("15,", "10, 15,"), "--num_gpus=2", "-q", "--signal=USR1", "--grace=1")
    launcher.wait_for_files("ready0", "ready1")
    launcher.process.send_signal(signal.SIGUSR1)
    code, _, err = launcher.finish()
    assert code == 128 + signal.SIGUSR1, err
    assert "the ranks have not ended within 1 s (--grace) of the signal of --signal" in err
    assert not launcher.processes()
