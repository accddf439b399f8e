"""The part of autotuning that runs in the ``deepspeed`` command: starts the script, reads its results, chooses.

The ranks of the first start (the profile) plan all candidates. Each later start measures one of them. This module does
not import torch.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console

from deepspeed.autotuning.choice import CandidatePlan, TrialQueue
from deepspeed.autotuning.experiment import (
    MICRO,
    PROFILE,
    RUN,
    TOTAL,
    TRIAL,
    Changes,
    Experiment,
    applied,
    split_choices,
    write_json,
)
from deepspeed.autotuning.results import metric_of, reason_of, results_table, summary_text
from deepspeed.config.sections.autotuning import TUNING_VARIABLE, Autotuning
from deepspeed.config.source import read_source
from deepspeed.errors import DeepSpeedConfigError, DeepSpeedError
from deepspeed.logging import logger

PROFILE_NAME = "profile_model_info"
ForkCommand = Callable[[Sequence[str], Mapping[str, str], tuple[int, int]], int]
"""``fork(program, environment, (stdout, stderr)) -> pid``: starts a program.

``program`` contains its arguments, ``environment`` additional variables; the last two are file descriptors.
"""


class AutotuningError(DeepSpeedError):
    """Raised when no configuration was found; the message gives the reason."""


class Autotuner:
    """Finds the fastest configuration of a script.

    Args:
        args: The parsed command line of ``deepspeed`` (:func:`deepspeed.launcher.runner.parse_args`). Its options that
            select where ranks start, ``start_options``, are passed to each start of the script. Its ``fork_command``
            (optional) runs the ``deepspeed`` command in a fork of this process, which has imported torch already.

    Raises:
        DeepSpeedConfigError: The configuration that the script's arguments name cannot be read.
    """

    def __init__(self, args: argparse.Namespace, active_resources: Mapping[str, Sequence[int | str]]) -> None:
        self.args = args
        self._resources = active_resources
        self._options: list[str] = list(getattr(args, "start_options", ()))
        found = find_config(args.user_args)
        config = None if found is None else dict(read_source(found[2]).data)
        self._config: dict[str, Any] | None = None
        self._choices: dict[str, list[Any]] = {}
        if config is not None:
            self._config, self._choices = split_choices(config)
        self._own_config: dict[str, Any] = {}
        self.section = Autotuning.model_validate(dict((config or {}).get("autotuning") or {}))
        self.results_dir, self.exps_dir = Path(self.section.results_dir), Path(self.section.exps_dir)
        self._queue: TrialQueue | None = None
        self._profile: dict[str, Any] = {}
        self._started = time.monotonic()
        self._fork: ForkCommand | None = getattr(args, "fork_command", None)
        self.seconds = 0.0

    # -- what programs call --------------------------------------------------------------------------------------

    def tune(self) -> None:
        """Plans all candidates and measures the best of them.

        Raises:
            AutotuningError: The script failed before it could be profiled, no candidate fits, or all trials failed.
        """
        for folder in (self.results_dir, self.exps_dir):
            if self.section.overwrite and folder.exists():
                for path in folder.iterdir():  # only files of an earlier search
                    if path.is_dir() and (path / "exp.json").exists():
                        shutil.rmtree(path)
                    elif path.suffix == ".json" and path.is_file() and path.name != "ds_config.json":
                        path.unlink()
            folder.mkdir(parents=True, exist_ok=True)
        queue = self._queue = self._planned()
        try:
            while (row := queue.next()) is not None:
                self._measure(queue, row)
        except SystemExit:  # a signal has ended the search
            if queue.best is not None:
                logger.warning(
                    f"autotuning: stopped after {len(queue.measured)} trials; the fastest so far is {queue.best}, in "
                    f"{self._folder(queue.best)}/ds_config.json. Set autotuning.overwrite=false to continue it"
                )
            raise
        self.seconds = time.monotonic() - self._started
        if queue.best is None:
            self.print_tuning_results()
            raise AutotuningError(f"autotuning: no candidate was measured: {self._why_none(queue)}")
        logger.info(f"autotuning: ended after {self.seconds:.1f} s: {queue.why_over()}")

    def print_tuning_results(self) -> None:
        """Prints a table of predicted and measured times. Call :meth:`tune` first."""
        queue = self._known()
        # A file or a pipe has no width; rich would take 80 columns and cut the names.
        width = None if sys.stdout.isatty() else 130
        Console(width=width).print(results_table(queue, samples=self._samples))
        if queue.best is not None:
            best = queue.measured[queue.best]
            ran = self._profile["changes"]
            text = f"{queue.best}: {best * 1e3:.2f} ms per update, {self._samples / best:,.1f} samples/s of wall time"
            if ran[TOTAL] == self._samples:
                text += (
                    f"; with its own configuration it took {self._profile['seconds'] * 1e3:.2f} ms in the first start"
                )
            Console().print(text, soft_wrap=True, highlight=False, markup=False)

    def write_optimal_config(self) -> None:
        """Writes ``ds_config_optimal.json``, ``cmd_optimal.txt`` and ``summary.txt`` to ``autotuning.results_dir``."""
        queue = self._known()
        assert queue.best is not None, "tune raises where nothing was measured"
        changes = dict(self._row(queue.best).changes)
        path = self.results_dir / "ds_config_optimal.json"
        write_json(path, applied(self._base(), changes))
        environment, command = self._command(self._best_run(changes), path, changes)
        words = [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
        (self.results_dir / "cmd_optimal.txt").write_text(
            " ".join([*words, "deepspeed", *map(shlex.quote, command)]) + "\n", encoding="utf-8"
        )
        text = summary_text(queue, self.section.metric, self._samples, self.seconds)
        (self.results_dir / "summary.txt").write_text(text, encoding="utf-8")
        logger.info(
            f"autotuning: the fastest configuration is in {path}; to train with it: {path.parent}/cmd_optimal.txt"
        )

    def run_after_tuning(self) -> int:
        """Runs the script with the fastest configuration; returns its exit code."""
        queue = self._known()
        assert queue.best is not None, "tune raises where nothing was measured"
        changes = dict(self._row(queue.best).changes)
        path = self.results_dir / "ds_config_optimal.json"
        environment, command = self._command(self._best_run(changes), path, changes)
        return _run_to_end(_launcher(command), environment, None)

    # -- the first start -----------------------------------------------------------------------------------------

    def _planned(self) -> TrialQueue:
        slots = [len(slots) for slots in self._resources.values()]
        section = self.section.model_dump(mode="json")
        experiment = Experiment(
            PROFILE_NAME,
            PROFILE,
            str(self._folder(PROFILE_NAME)),
            choices=self._choices,
            section=section,
            first_step=2,
            last_step=4,
            ranks_per_node=min(slots, default=0),
        )
        shutil.rmtree(experiment.folder, ignore_errors=True)  # plans of an earlier search may be of other ranks
        logger.info("autotuning: first start of the script, which hands its model to the tuner")
        code = self._start(experiment, {})
        folder = self._folder(PROFILE_NAME)
        files = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("planned-*.json"))]
        if code or not files:
            raise AutotuningError(
                f"autotuning: the script could not be profiled: {self._failure(folder, code)[0]}. Its output is in "
                f"{folder}; nothing was measured"
            )
        self._profile = files[0]["profile"]
        self._own_config = files[0]["config"]
        if self._config is None:  # the section is in the script too; the folders are already there
            self.section = Autotuning.model_validate(files[0]["section"])
        rows = [CandidatePlan.of(row) for file in files for row in file["rows"]]
        seconds = sum(row["plan_seconds"] for file in files for row in file["rows"])
        fitting = [row for row in rows if row.fits]
        logger.info(
            f"autotuning: {len(rows)} candidates planned in {seconds:.1f} s, {len(fitting)} fit; predictions "
            f"are based on a measured step of {self._profile['seconds'] * 1e3:.1f} ms"
        )
        return TrialQueue(rows, self.section.tuner_num_trials, self.section.tuner_early_stopping)

    # -- the trials ----------------------------------------------------------------------------------------------

    def _measure(self, queue: TrialQueue, row: CandidatePlan) -> None:
        folder = self._folder(row.name)
        first = max(self.section.start_profile_step, 1)
        experiment = Experiment(
            row.name,
            TRIAL,
            str(folder),
            changes=dict(row.changes),
            first_step=first,
            last_step=max(self.section.end_profile_step, first),
        )
        metrics = folder / "metrics.json"
        code = 0
        if metrics.exists() and experiment.path.exists() and Experiment.read(experiment.path) == experiment:
            logger.info(f"autotuning: {row.name}: measured before (autotuning.overwrite is false)")
        else:
            shutil.rmtree(folder, ignore_errors=True)
            logger.info(f"autotuning: {row.name}: predicted {queue.expected(row) * 1e3:.1f} ms +- {queue.error:.0%}")
            code = self._start(experiment, experiment.changes)
        if metrics.exists() and not code:
            facts = json.loads(metrics.read_text(encoding="utf-8"))
            low, high = facts["latency_quartiles"]
            # Other load on the machine only makes updates slower, so the fast updates compare candidates best.
            seconds = low / 1e3
            write_json(metrics, {**facts, "FLOPS_per_gpu": metric_of("flops", row, seconds, self._samples)})
            queue.measured[row.name] = seconds
            logger.info(
                f"autotuning: {row.name}: {low:.1f} ms per update (the first quartile; median {facts['latency']:.1f}, "
                f"third quartile {high:.1f}), {self._samples / seconds:,.1f} samples/s"
            )
            return
        reason, is_micro_batch = self._failure(folder, code)
        queue.failed[row.name] = reason
        logger.warning(f"autotuning: {row.name} failed: {reason}")
        if is_micro_batch:
            queue.micro_batches = {self._profile["changes"][MICRO]}

    def _start(self, experiment: Experiment, changes: Changes) -> int:
        folder = Path(experiment.folder)
        folder.mkdir(parents=True, exist_ok=True)
        config = applied(self._base(), changes)
        path = folder / "ds_config.json"
        write_json(path, config)
        described = {
            "ds_config": config,
            "num_gpus": min((len(slots) for slots in self._resources.values()), default=1),
            "num_nodes": len(self._resources),
            "hostfile": self.args.hostfile,
        }
        experiment.write(**described)
        write_json(self.exps_dir / f"{experiment.name}.json", {"name": experiment.name, **described})
        environment, command = self._command(experiment, path, changes)
        (folder / "cmd.txt").write_text(f"deepspeed {shlex.join(command)}\n", encoding="utf-8")
        return _run_to_end(_launcher(command), environment, folder, self._fork)

    def _command(self, experiment: Experiment, path: Path, changes: Changes) -> tuple[dict[str, str], list[str]]:
        arguments = with_config(self.args.user_args, path.resolve())
        arguments = with_mapped(arguments, self.section.arg_mappings, changes)
        return {TUNING_VARIABLE: str(experiment.path.resolve())}, [*self._options, self.args.user_script, *arguments]

    def _best_run(self, changes: Changes) -> Experiment:
        experiment = Experiment("optimal", RUN, str(self._folder("optimal")), changes=changes)
        experiment.write()
        return experiment

    # -- what is known -------------------------------------------------------------------------------------------

    def _base(self) -> dict[str, Any]:
        """Returns the script's configuration: from its arguments, else the one passed to ``initialize``, once known."""
        return self._own_config if self._config is None else self._config

    def _known(self) -> TrialQueue:
        if self._queue is None:
            raise AutotuningError("Autotuner: expected a call of tune() before this one, found none; call tune()")
        return self._queue

    def _row(self, name: str) -> CandidatePlan:
        return next(row for row in self._known().rows if row.name == name)

    def _folder(self, name: str) -> Path:
        return self.results_dir.resolve() / name

    @property
    def _samples(self) -> int:
        rows = self._known().rows if self._queue is not None else ()
        return next((int(row.changes[TOTAL]) for row in rows), 0)

    def _failure(self, folder: Path, code: int) -> tuple[str, bool]:
        """Returns why a start failed, and whether the script ignores the micro-batch size of the configuration."""
        path = folder / "failure.json"
        if path.exists():
            facts = json.loads(path.read_text(encoding="utf-8"))
            return facts["reason"], bool(facts.get("is_micro_batch"))
        return reason_of(folder, code), False

    def _why_none(self, queue: TrialQueue) -> str:
        if queue.failed:
            return "; ".join(f"{name}: {reason}" for name, reason in queue.failed.items())
        refused = [row for row in queue.rows if row.refusal]
        if len(refused) == len(queue.rows):
            return refused[0].refusal if refused else "the configuration leaves nothing to choose"
        return "no candidate fits; the table lists the missing memory. Use more devices, which ds_plan can plan for"


def _launcher(command: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "deepspeed.launcher.runner", *command]


def _run_to_end(
    program: Sequence[str], environment: Mapping[str, str], folder: Path | None, fork: ForkCommand | None = None
) -> int:
    """Runs a program and returns its exit code. A signal to this process is forwarded to the program and ends both.

    Args:
        folder: Receives ``stdout.log`` and ``stderr.log``; None: the program inherits the streams of this process.
        fork: Starts the program instead of ``subprocess``; used only with ``folder``.

    Raises:
        SystemExit: This process received a signal. (If a signal ended only the program, its exit code is returned.)
    """
    received: list[int] = []
    pid: int | None = None

    def pass_on(number: int, _: Any) -> None:
        received.append(number)
        if pid is not None:
            os.kill(pid, number)  # not waited for yet, so its pid is not reused

    with ExitStack() as stack:
        out, err = (None, None)
        if folder is not None:
            out, err = (stack.enter_context((folder / name).open("wb")) for name in ("stdout.log", "stderr.log"))
        for number in _SIGNALS:
            stack.callback(signal.signal, number, signal.signal(number, pass_on))
        process = None
        if fork is not None and out is not None and err is not None:
            pid = fork(program, environment, (out.fileno(), err.fileno()))
        else:
            process = subprocess.Popen(program, env={**os.environ, **environment}, stdout=out, stderr=err)
            pid = process.pid
        for early in list(received):  # received while the program was being started
            os.kill(pid, early)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if process is not None:
            process.returncode = code
    if received:
        raise SystemExit(128 + received[0])
    return code


_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


_OPTIONS = ("--deepspeed_config", "--deepspeed", "--deepscale_config")


def find_config(arguments: Sequence[str]) -> tuple[int, str, str] | None:
    """Returns index, prefix (``--deepspeed_config=`` or empty) and path of the configuration in a script's arguments.

    None: no argument names a configuration; the script may pass a dict to ``initialize``.
    """
    for place, argument in enumerate(arguments):
        option, equals, value = argument.partition("=")
        if option not in _OPTIONS:
            continue
        if equals:
            return place, f"{option}=", value
        if place + 1 < len(arguments) and not arguments[place + 1].startswith("-"):
            return place + 1, "", arguments[place + 1]
    return None


def with_config(arguments: Sequence[str], path: Path) -> list[str]:
    """Returns a script's arguments with the path of the configuration replaced by ``path``."""
    made, found = list(arguments), find_config(arguments)
    if found is not None:
        place, prefix, _ = found
        made[place] = f"{prefix}{path}"
    return made


def with_mapped(arguments: Sequence[str], mappings: Mapping[str, Any] | None, changes: Changes) -> list[str]:
    """Returns a script's arguments with the candidate's values for the options in ``autotuning.arg_mappings``.

    Keys of ``mappings`` are those of the configuration (dotted below a section), values its arguments.

    Raises:
        DeepSpeedConfigError: A value of ``mappings`` does not start with ``-``.
    """
    made = list(arguments)
    for key, option in (mappings or {}).items():
        name = str(option).strip()
        if not name.startswith("-"):
            raise DeepSpeedConfigError(
                f"autotuning.arg_mappings[{key!r}]: expected an option of the script, such as --batch_size, found "
                f"{option!r}"
            )
        value = changes.get(key.strip())
        if value is None:
            continue
        places = [place for place, argument in enumerate(made) if argument.partition("=")[0] == name]
        if not places:
            made += [name, str(value)]
        elif "=" in made[places[-1]]:
            made[places[-1]] = f"{name}={value}"
        else:
            made[places[-1] + 1 : places[-1] + 2] = [str(value)]
    return made
