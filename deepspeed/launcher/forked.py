"""Runs Python scripts in forks of a process that has imported torch and this package, which saves seconds per start.

A command that starts a script several times, such as a search for a configuration, imports them once by
:class:`ImportCache`. Its launchers and their ranks are then forks, each with the parent, session, files and environment
that a new program would have. A rank that would behave differently gets a fresh interpreter instead, even if that is
seen only when its script sets a variable that torch has already read.
"""

from __future__ import annotations

import atexit
import builtins
import gc
import importlib
import io
import os
import signal
import sys
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import SourceFileLoader
from typing import Any

from deepspeed.logging import logger, name_source, set_default_log_level

SWITCH = "DS_AUTOTUNING_FORK"
"""Variable set by the user; 0: never fork."""

_IMPORTED = ("torch", "deepspeed.autotuning.feature", "deepspeed.engine.engine", "deepspeed.engine.initialize")
_READ_AT_IMPORT = ("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "TORCH", "PYTORCH", "DS_ACC")
_OF_RANK = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_SIZE",
    "CROSS_RANK",
    "CROSS_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "COLUMNS",
)


class ImportCache:
    """Libraries that this process has imported for its forks."""

    def __init__(self) -> None:
        self._environment: dict[str, str] | None = None

    def load(self, variables: Mapping[str, str]) -> bool:
        """Imports torch, which then reads ``variables``, and this package; returns whether ranks can be forks.

        They cannot if the program had already imported torch: it may have started threads or use a device.
        """
        if "torch" in sys.modules or _has_options() or not _can_fork():
            return False
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
            for name in _IMPORTED:
                importlib.import_module(name)
            self._environment = _common_environment(os.environ)
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
        gc.collect()
        gc.freeze()  # otherwise garbage collection in each fork would write to, and so copy, every page
        return _can_fork()

    def can_run(self, command: Sequence[str], environment: Mapping[str, str]) -> bool:
        """Returns whether a fork of this process can run a command as a fresh interpreter would."""
        if self._environment is None or self._environment != _common_environment(environment) or not _can_fork():
            return False
        if tuple(command[:2]) != (sys.executable, "-u") or len(command) < 3 or not os.path.isfile(command[2]):
            return False
        # A script could not import a module in its folder if another one of that name is already loaded.
        try:
            return not any(name in sys.modules for name in _modules_beside(command[2]))
        except OSError:  # the folder cannot be listed
            return False


IMPORTS = ImportCache()


def _can_fork() -> bool:
    return hasattr(os, "fork") and threading.active_count() == 1


def _has_options() -> bool:
    """Returns whether this interpreter got options, such as -O, which an interpreter of a rank would not get."""
    options = ("optimize", "safe_path", "isolated", "ignore_environment", "no_site", "no_user_site", "bytes_warning")
    return any(getattr(sys.flags, name, 0) for name in options) or bool(sys.warnoptions or sys._xoptions)


def _modules_beside(script: str) -> list[str]:
    found = []
    with os.scandir(_folder_of(script)) as entries:
        for entry in entries:
            stem, dot, ending = entry.name.partition(".")
            if entry.is_dir() if not dot else ending == "py" or ending.endswith("so"):
                found.append(stem)
    return found


def _common_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that are the same in all ranks of all starts; libraries may read them when they start."""
    return {
        name: value
        for name, value in environment.items()
        if name not in _OF_RANK and (name.startswith("DS_ACC") or not name.startswith(("DS_", "DEEPSPEED_")))
    }


def fork_rank(
    command: Sequence[str],
    environment: Mapping[str, str],
    streams: tuple[int | None, int, int],
    prepare: Callable[[], None],
) -> int:
    """Starts a script in a new session; returns the process id.

    Args:
        command: The interpreter, ``-u``, script and arguments, :meth:`ImportCache.can_run` is true for it.
        streams: Descriptors of its standard input (None: that of this process), output and error.
        prepare: Called in the new process before the script.
    """
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        prepare()
        _reset_signals()  # last, as ``prepare`` leaves the handlers with which an interpreter starts
        for number, source in enumerate(streams):
            if source is not None:
                os.dup2(source, number)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        os.environ.clear()
        os.environ.update(environment)
        if _has_unusable_device():
            os.execve(command[0], list(command), environment)
        _watch_environment(command, environment)
        code = _run_script(command)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    finally:
        os._exit(code)


def fork_command(main: Callable[[], None], environment: Mapping[str, str], output: tuple[int, int]) -> int:
    """Runs ``main``, which reads ``sys.argv``, in a fork that writes to ``output`` (out, err); returns the id."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        _reset_signals()
        for number, source in enumerate(output, start=1):
            os.dup2(source, number)
        os.environ.update(environment)
        code = _exit_code(main)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:
        os._exit(code)


def _reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _watch_environment(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Starts the script again in an interpreter if it changes a variable that the imported libraries have read.

    Otherwise ``os.environ["OMP_NUM_THREADS"] = "4"`` before ``import torch`` would have no effect, and times would be
    measured with another number of threads. Not done for changes by libraries, which may set variables for their
    children, or once the process group exists, as the script has then imported torch.
    """
    libraries = frozenset(name.partition(".")[0] for name in sys.modules) - {"__main__"}
    comm = sys.modules.get("deepspeed.comm")

    def check(name: bytes, value: bytes | None) -> None:
        text = os.fsdecode(name)
        if not text.startswith(_READ_AT_IMPORT) or value == os.environb.get(name):
            return
        frame: types.FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_globals.get("__name__") in ("os", "collections.abc"):
            frame = frame.f_back
        caller = "" if frame is None else str(frame.f_globals.get("__name__"))
        if caller.partition(".")[0] in libraries or (comm is not None and comm.is_initialized()):
            return
        logger.info(f"{command[2]}: {caller} sets {text}, so the script starts again in an interpreter of its own")
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.execve(command[0], list(command), environment)

    put, unset = os.putenv, os.unsetenv

    def putenv(name: Any, value: Any, /) -> None:
        check(os.fsencode(name), os.fsencode(value))
        put(name, value)

    def unsetenv(name: Any, /) -> None:
        check(os.fsencode(name), None)
        unset(name)

    os.putenv, os.unsetenv = putenv, unsetenv


def _has_unusable_device() -> bool:
    """Returns whether a device was opened before the fork, so that this process could not use it."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda._is_in_bad_fork())


def _run_script(command: Sequence[str]) -> int:
    """Runs a script as ``python -u SCRIPT`` does, to the end of its ``atexit`` functions; returns the exit code."""
    script = command[2]
    sys.argv, sys.orig_argv = list(command[2:]), list(command)
    sys.path[0] = _folder_of(script)
    _open_unbuffered_streams()
    name_source(None)
    set_default_log_level()
    if "torch" in sys.modules:  # each process starts with another seed; Python's random does that itself
        sys.modules["torch"].default_generator.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    module = types.ModuleType("__main__")
    path = os.path.abspath(script)
    loader = SourceFileLoader("__main__", path)
    module.__dict__.update(__file__=path, __builtins__=builtins, __cached__=None, __loader__=loader)
    sys.modules["__main__"] = module
    code = _exit_code(lambda: _execute(script, module))
    for finish in (threading._shutdown, atexit._run_exitfuncs):  # type: ignore[attr-defined]
        finish()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if code == 128 + signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return code


def _execute(script: str, module: types.ModuleType) -> None:
    with open(script, "rb") as file:
        code = compile(file.read(), module.__dict__["__file__"], "exec", dont_inherit=True)
    exec(code, module.__dict__)


def _exit_code(run: Callable[[], None]) -> int:
    """Calls ``run``; returns the exit code of an interpreter, and reports an exception as one does."""
    try:
        run()
    except SystemExit as end:
        if isinstance(end.code, int):
            return end.code & 0xFF
        if end.code is None:
            return 0
        sys.stderr.write(f"{end.code}\n")
        return 1
    except BaseException as error:
        _report(error)
        return 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _report(error: BaseException) -> None:
    """Calls ``sys.excepthook`` as an interpreter does, without the frames of this module."""
    trace: Any = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    sys.excepthook(type(error), error.with_traceback(trace), trace)


def _open_unbuffered_streams() -> None:
    """Opens standard output and error as ``python -u`` does."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        before = getattr(sys, name)
        raw = io.FileIO(number, "w", closefd=False)
        errors = "backslashreplace" if number == 2 else before.errors
        stream = io.TextIOWrapper(raw, encoding=before.encoding, errors=errors, write_through=True)  # type: ignore[type-var]
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _folder_of(script: str) -> str:
    return os.path.dirname(os.path.realpath(script))
