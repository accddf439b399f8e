"""Scripts in a fork, beside the same scripts as programs of their own."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from deepspeed.launcher.forked import ImportCache

FORK = """
import os, signal, sys
from deepspeed.launcher.forked import fork_rank
def prepare():  # as the supervisor does
    signal.signal(signal.SIGINT, signal.SIG_DFL)
pid = fork_rank([sys.executable, "-u", *sys.argv[1:]], {**os.environ, "ADDED": "1"}, (None, 1, 2), prepare)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) % 256)
"""

SHOW = """
import atexit, os, signal, sys, threading
import beside
atexit.register(print, "first function, last")
threading.Thread(target=lambda: (threading.main_thread().join(), print("a thread was waited for"))).start()
print(sys.argv, sys.orig_argv[1:], __name__, __file__, sys.path[0], beside.VALUE, os.environ["ADDED"], __package__)
print(sys.modules["__main__"].__dict__ is globals(), signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))
print(os.getsid(0) == os.getpid(), sorted(int(n) for n in os.listdir("/proc/self/fd") if int(n) > 2)[1:])
print(sys.stdin.read(), "on stderr", file=sys.stderr)
sys.stdout.buffer.write(b"bytes\\n")
END
"""


def run(folder: Path, script: str, *, forked: bool) -> tuple[int, str, str]:
    """Runs a script; returns exit code, output and errors."""
    (folder / "beside.py").write_text("VALUE = 5\n")
    (folder / "script.py").write_text(script)
    how = ["-c", FORK] if forked else ["-u"]
    done = subprocess.run(
        [sys.executable, *how, "script.py", "--local_rank=1", "a b"],
        cwd=folder,
        input="input",
        capture_output=True,
        text=True,
        start_new_session=not forked,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job of a shell ignores it
        env={**os.environ, "ADDED": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
        timeout=60,
    )
    return done.returncode % 256, done.stdout, done.stderr


@pytest.mark.parametrize(
    "end", ["", "sys.exit(3)", "sys.exit('a reason')", "{}['missing']", "raise KeyboardInterrupt", "1 +"]
)
def test_a_script_in_a_fork_cannot_be_told_from_one_of_its_own(end, tmp_path):
    script = SHOW.replace("END", end)
    expected = run(tmp_path, script, forked=False)
    found = run(tmp_path, script, forked=True)
    assert found == expected
    assert "a thread was waited for" in found[1] or end == "1 +"


def test_a_process_with_torch_is_not_forked(tmp_path):
    (tmp_path / "script.py").write_text("")
    cache = ImportCache()
    assert "torch" in sys.modules and not cache.load({})
    assert not cache.can_run([sys.executable, "-u", str(tmp_path / "script.py")], os.environ)


def test_what_a_fork_cannot_run_as_a_new_interpreter_would(tmp_path, monkeypatch):
    cache = ImportCache()
    environment = {"OMP_NUM_THREADS": "1", "RANK": "0"}
    cache._environment = {"OMP_NUM_THREADS": "1"}
    monkeypatch.setattr("threading.active_count", lambda: 1)  # pytest may have more
    script = tmp_path / "train.py"
    script.write_text("")
    (tmp_path / "samples_of_this_test").mkdir()
    (tmp_path / "torch.json").write_text("{}")
    command = [sys.executable, "-u", str(script), "--local_rank=0"]
    assert cache.can_run(command, environment)
    assert cache.can_run(command, {**environment, "RANK": "1"})
    assert not cache.can_run(command, {**environment, "OMP_NUM_THREADS": "2"})  # torch has read it
    assert not cache.can_run(command, {**environment, "PYTHONPATH": "elsewhere"})
    assert not cache.can_run(command, {**environment, "HF_HOME": "elsewhere"})  # any library may have read it
    assert not cache.can_run(command, {**environment, "DS_ACCELERATOR": "cpu"})
    assert cache.can_run(command, {**environment, "DS_RUN_ID": "1", "DEEPSPEED_ELASTIC_NOTES": "folder"})
    assert not cache.can_run([sys.executable, "-u", "-m", "train"], environment)
    assert not cache.can_run([str(script)], environment)
    (tmp_path / "json.py").write_text("")  # the script expects this one
    assert not cache.can_run(command, environment)


@pytest.mark.parametrize("how", ["os.environ['OMP_NUM_THREADS'] = '3'", "import beside", "del os.environ['KMP_X']"])
def test_a_script_that_sets_what_torch_has_read_starts_again_in_an_interpreter(how, tmp_path):
    (tmp_path / "beside.py").write_text("import os\nos.environ.update(OMP_NUM_THREADS='3')\n")
    show = "print('deepspeed.launcher.forked' in sys.modules, os.environ.get('OMP_NUM_THREADS'))"
    (tmp_path / "script.py").write_text(f"import os, sys\nos.environ['OMP_NUM_THREADS'] = '1'\n{how}\n{show}")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "KMP_X": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", FORK, "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment, timeout=60)
    assert (done.returncode, done.stdout) == (0, f"False {1 if 'KMP' in how else 3}\n"), done.stderr
    name, caller = ("KMP_X" if "KMP" in how else "OMP_NUM_THREADS"), "beside" if "beside" in how else "__main__"
    assert f"script.py: {caller} sets {name}, so the script starts again" in done.stderr


def test_ranks_in_forks_begin_with_different_random_numbers(tmp_path):
    (tmp_path / "script.py").write_text(
        "import random, numpy, torch\nprint(random.random(), numpy.random.rand(), *torch.rand(1))"
    )
    command = [
        sys.executable,
        "-c",
        f"import torch, numpy\n{FORK}\n{FORK}".replace("sys.exit", "print", 1),
        "script.py",
    ]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment, timeout=60)
    numbers = [word for word in done.stdout.replace("tensor(", "").replace(")", "").split() if "." in word]
    assert len(set(numbers)) == len(numbers) == 6, done.stdout + done.stderr
