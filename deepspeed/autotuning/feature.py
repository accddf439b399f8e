"""The part of ``deepspeed --autotuning`` that runs in the ranks of a script: plans candidates, or measures one.

The first engine that a script builds reads the experiment (:mod:`.experiment`) and applies its changes to the
configuration. After the last measured update every rank raises ``SystemExit(0)`` from inside ``engine.step()``.
"""

from __future__ import annotations

import atexit
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.autotuning.candidates import BatchLimits, CandidateSpace
from deepspeed.autotuning.experiment import (
    ACCUMULATION,
    MICRO,
    PROFILE,
    RUN,
    TOTAL,
    Changes,
    Experiment,
    applied,
    get,
    split_choices,
    take_experiment,
    write_json,
)
from deepspeed.autotuning.planned import CandidatePlanner, InputSpec, ranks_that_plan, require_plannable
from deepspeed.autotuning.probes import measure_device
from deepspeed.comm.transports.objects import gather_objects
from deepspeed.config.sections.root import Root
from deepspeed.config.source import read_source
from deepspeed.engine_feature import EngineFeature, EngineHooks, EngineSetup, StepTracker
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.plan.machine import Machine
from deepspeed.plan.models import without_values
from deepspeed.run_report.clock import phase_clock
from deepspeed.run_report.failures import describe_exception, uncaught_exception
from deepspeed.zero.group import Groups
from deepspeed.zero.runtime import ZeroRuntime

FAILURE, METRICS = "failure.json", "metrics.json"
_SMALL_MICRO_BATCH = 4  # samples; the largest micro-batch of a profile if the configuration does not set one
_PHASES = {"forward": "fwd", "backward": "bwd", "step": "step"}


@dataclass(frozen=True)
class TuningConfig:
    """The configuration that the script passed to ``initialize``."""

    experiment: Experiment  # the experiment that this start of the script belongs to
    config: dict[str, Any]  # the script's configuration, with the first value of each list of candidates
    choices: dict[str, list[Any]]  # candidate values by dotted path
    changes: Changes  # changes that this start makes to ``config``

    @classmethod
    def of(cls, experiment: Experiment, config: Any) -> TuningConfig:
        """Reads the script's configuration."""
        base, choices = split_choices(read_source(config).data)
        choices = {**experiment.choices, **choices}
        changes = experiment.changes if experiment.kind != PROFILE else _small_batch(base, choices)
        return cls(experiment, base, choices, changes)


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _ranks_of_samples(config: dict[str, Any]) -> int:
    tensor, sequence = get(config, "tensor_parallel.autotp_size") or 1, config.get("sequence_parallel_size") or 1
    return max(comm.get_world_size() // (max(int(tensor), 1) * max(int(sequence), 1)), 1)


def _small_batch(config: dict[str, Any], choices: dict[str, list[Any]]) -> Changes:
    if _is_number(config.get(MICRO)):
        return {}
    own = config[TOTAL] // _ranks_of_samples(config) if _is_number(config.get(TOTAL)) else 1
    sizes = [size for size in choices.get(MICRO) or range(1, _SMALL_MICRO_BATCH + 1) if own % size == 0]
    micro = max(sizes, default=1)
    return {TOTAL: None, MICRO: micro, ACCUMULATION: min(2, max(own // micro, 1))}


class PhaseTimer(StepTracker):
    """Adds up the seconds of the engine's outermost phases."""

    def __init__(self) -> None:
        self._clock = phase_clock()
        self._open: list[tuple[str, Any]] = []
        self._intervals: list[tuple[str, Any, Any]] = []

    def reset(self) -> None:
        """Discards the phases recorded so far."""
        self._intervals.clear()

    @override
    def begin(self, phase: str) -> None:
        self._open = [entry for entry in self._open if entry[0] != phase]  # an exception left it
        self._open.append((phase, self._clock.mark()))

    @override
    def end(self, phase: str) -> None:
        if not self._open or self._open[-1][0] != phase:
            return
        _, started = self._open.pop()
        if not self._open:
            self._intervals.append((phase, started, self._clock.mark()))

    def seconds(self) -> dict[str, float]:
        """Returns the seconds by phase; waits for the device."""
        found: dict[str, float] = defaultdict(float)
        for phase, begin, end in self._intervals:
            found[phase] += self._clock.seconds(begin, end)
        return dict(found)


class TuningHooks(EngineHooks):
    """Measures the updates of one rank, and ends the script after the last one.

    ``model`` is on ``meta``, as it was before ``initialize``; None in a trial.
    """

    def __init__(self, start: TuningConfig, setup: EngineSetup, model: nn.Module | None) -> None:
        self.tracker: PhaseTimer = PhaseTimer()
        self._start, self._setup, self._model = start, setup, model
        self._experiment = start.experiment
        self._updates = 0
        self._clock = phase_clock()
        self._marks: list[Any] = []  # at the start of the first measured update, and at the end of each
        self._inputs: InputSpec | None = None
        self._engine: Any = None
        self._is_over = False
        self._earlier_exception = uncaught_exception()

    def begin(self, engine: Any) -> None:
        """Starts to record the inputs of the model. Called once the engine is built."""
        self._engine = engine
        if self._experiment.first_step <= 1:
            self._marks.append(self._clock.mark())
        self._handle = engine.module.register_forward_pre_hook(self._take_inputs, with_kwargs=True)
        atexit.register(self._end_early)

    def _take_inputs(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._inputs is not None or not module.training:
            return
        self._inputs = InputSpec.of(args, kwargs)
        seen, wanted = self._inputs.samples, self._engine.train_micro_batch_size_per_gpu()
        if self._experiment.kind != PROFILE and seen != wanted:
            self._fail(
                f"the script gave its model {seen} samples where {MICRO} is {wanted}: take the size of a batch from "
                "the configuration (engine.train_micro_batch_size_per_gpu(), or training_data of initialize), or name "
                "the script's argument in autotuning.arg_mappings",
                is_micro_batch=True,
            )

    def _fail(self, reason: str, **facts: Any) -> None:
        """Ends the script with exit code 0; writes the reason to ``failure.json``. That of rank 0 has priority."""
        self._is_over = True
        failure = Path(self._experiment.folder) / FAILURE
        if comm.get_rank() == 0 or not failure.exists():  # it may be this rank alone that fails
            write_json(failure, {"reason": reason, **facts})
        sys.exit(0)

    def _end_early(self) -> None:
        """Runs at exit. If the script ended before its last update, writes the metrics so far, or why there are none.

        Writes nothing if an exception ended the script: the tuner reads the exception from the rank's stderr.
        """
        if self._is_over:
            return
        self._is_over = True
        if describe_exception(self._earlier_exception):
            return
        if comm.is_initialized() and comm.get_rank() != 0:
            return
        if len(self._marks) > 1 and self._experiment.kind != PROFILE:
            self._write_metrics()
            return
        reason = (
            f"the script ended after {self._updates} updates, before any was measured (updates "
            f"{self._experiment.first_step} to {self._experiment.last_step}); let it train longer, or lower "
            "autotuning.start_profile_step"
        )
        failure = Path(self._experiment.folder) / FAILURE
        if not failure.exists():
            write_json(failure, {"reason": reason})

    @override
    def after_step(self, global_steps: int) -> None:
        if self._is_over:
            return
        self._updates += 1
        first, last = self._experiment.first_step, self._experiment.last_step
        if self._updates == first - 1:
            get_accelerator().synchronize()
            self.tracker.reset()
        if self._updates >= first - 1:
            self._marks.append(self._clock.mark())
        if self._updates == last:
            self._finish()

    def _finish(self) -> None:
        get_accelerator().synchronize()
        self._is_over = True
        if self._experiment.kind == PROFILE:
            self._plan()
        elif comm.get_rank() == 0:
            self._write_metrics()
        sys.exit(0)

    def _walls(self) -> list[float]:
        """Returns the seconds of each measured update, from the end of the previous one; waits for the device."""
        return [self._clock.seconds(begin, end) for begin, end in pairwise(self._marks)]

    def _write_metrics(self) -> None:
        """Writes milliseconds per update, samples per second over all ranks, bytes; ``latency`` is the median."""
        walls = self._walls()
        measured, wall = len(walls), median(walls)
        low, _, high = quantiles(walls, n=4, method="inclusive") if measured > 1 else (wall,) * 3
        phases = self.tracker.seconds()
        # Phase times are sums over all updates; scale them to the median update.
        named = {name: phases.get(phase, 0.0) / sum(walls) * wall * 1e3 for phase, name in _PHASES.items()}
        write_json(
            Path(self._experiment.folder) / METRICS,
            {
                **named,
                "latency": wall * 1e3,
                "latency_quartiles": [low * 1e3, high * 1e3],
                "throughput": self._engine.train_batch_size() / wall,
                "steps": measured,
                "peak_memory": get_accelerator().max_memory_allocated(),
            },
        )

    # -- the profile -------------------------------------------------------------------------------------------------

    def _plan(self) -> None:
        """Plans this rank's part of the candidates and writes the plans. Every rank must call it."""
        self._handle.remove()
        walls = self._walls()
        wall = median(walls)
        inside = wall * sum(self.tracker.seconds().values()) / sum(walls)
        own_ranks = self._experiment.ranks_per_node or comm.get_world_size()
        machine = self._machine(own_ranks)
        assert self._model is not None and self._inputs is not None, "an update has been made"
        planner = CandidatePlanner(
            self._model, self._inputs, self._start.config, machine, "cpu" if self._is_cpu else "cuda"
        )
        micro, accumulation = self._engine.train_micro_batch_size_per_gpu(), self._engine.gradient_accumulation_steps()
        before = {TOTAL: self._engine.train_batch_size(), MICRO: micro, ACCUMULATION: accumulation}
        space, is_fixed = self._space(micro)
        settings, refine = space.settings(), not self._section.get("fast", True)
        folder = Path(self._experiment.folder)
        ratio, planners = 0.0, 1
        if comm.get_rank() == 0:
            ratio = planner.calibrate(before, inside)
            started = time.process_time()
            plan = planner.plan(before)
            write_json(
                folder / "model_info.json",
                {
                    "num_params": plan.parameters,
                    "trainable_num_params": plan.trained,
                    "activation_mem_per_gpu": max(plan.activations.values(), default=0),
                    "rank": plan.rank,
                },
            )
            planners = ranks_that_plan(len(settings), time.process_time() - started, own_ranks, refine=refine)
        # All planning ranks use the measurements of rank 0.
        label = "the measured step of the first rank"
        ranks = self._engine._parts.setup.job.axis_of().objects(patience=comm.default_timeout(), why=label)
        measured = gather_objects(ranks, (wall, inside, planner.machine, ratio, planners), label=label)[0]
        wall, inside, planner.machine, ratio, planners = measured
        if comm.get_rank() >= planners:
            return
        planner.outside = max(wall - inside, 0.0) * space.limits.total / before[TOTAL]
        rows = planner.plan_all(space, settings[comm.get_rank() :: planners], refine=refine)
        facts = {
            "rows": rows,
            "config": self._start.config,
            "section": self._section,
            "profile": {
                "changes": before,
                "seconds": wall,
                "engine_seconds": inside,
                "measured_over_predicted": ratio,
                "is_micro_batch_fixed": is_fixed,
                "device": planner.machine.device.name,
                "launch": planner.machine.device.efficiency.launch,
            },
        }
        write_json(folder / f"planned-{comm.get_rank()}.json", facts)

    def _space(self, micro: int) -> tuple[CandidateSpace, bool]:
        """Returns the space of candidates, and whether the script ignores the configured micro-batch size."""
        config, section = self._start.config, self._section
        choices = self._start.choices
        assert self._inputs is not None
        is_written = _is_number(config.get(MICRO)) and MICRO not in choices
        is_fixed = self._inputs.samples != micro
        if is_fixed and not is_written:
            sys.stderr.write(
                f"autotuning: the script gave its model {self._inputs.samples} samples where {MICRO} is {micro}, so "
                f"only {micro} is tried\n"
            )
        ranks = _ranks_of_samples(config)
        if _is_number(config.get(TOTAL)):
            total = config[TOTAL]
        elif _is_number(config.get(MICRO)):
            steps = config.get(ACCUMULATION)
            total = config[MICRO] * (steps if _is_number(steps) else 1) * ranks
        elif section.get("max_train_batch_size"):
            total = section["max_train_batch_size"]
        else:
            raise DeepSpeedConfigError(
                f"deepspeed --autotuning: neither {TOTAL} nor {MICRO} is a number, so the global batch of all "
                f"candidates is not known; set {TOTAL}, or autotuning.max_train_batch_size"
            )
        limits = BatchLimits(
            total,
            section.get("min_train_micro_batch_size_per_gpu", 1),
            section.get("max_train_micro_batch_size_per_gpu", 1024),
        )
        only = [micro] if is_written or is_fixed else None
        world = comm.get_world_size()
        return CandidateSpace(config, choices, limits, world, only, offloads=not self._is_cpu), is_fixed

    @property
    def _section(self) -> dict[str, Any]:
        """The section ``autotuning``; from the dict that the script passed, if the command could not read it."""
        return {**self._experiment.section, **(self._start.config.get("autotuning") or {})}

    @property
    def _is_cpu(self) -> bool:
        return self._setup.device.type == "cpu"

    def _machine(self, own_ranks: int) -> Machine:
        """Returns the measured machine. Every rank must call it."""
        root, device = self._setup.root, self._setup.device
        dtype = torch.bfloat16 if root.bf16.enabled else torch.float16 if root.fp16.enabled else torch.float32
        memory = get_accelerator().total_memory(device.index)
        memory = memory // own_ranks if self._is_cpu else memory
        made = measure_device(dtype, device, memory)
        world = comm.get_world_size()
        return Machine(made, max(world // own_ranks, 1), min(own_ranks, world), memory, network=max(made.link, 1.0))


class TuningFeature(EngineFeature):
    """Connects the tuner to the first engine that the script builds."""

    title = "autotuning"
    setting = "deepspeed --autotuning"
    only_watches = True

    def __init__(self) -> None:
        self._start: TuningConfig | None = None
        self._model: nn.Module | None = None

    @override
    def read_config(self, config: Any, mpu: Any) -> Any:
        experiment = take_experiment()
        if experiment is None:
            return config
        self._start = TuningConfig.of(experiment, config)
        return applied(self._start.config, self._start.changes)

    @override
    def complete(self, root: Root, model: nn.Module, mpu: Any) -> Root:
        """Copies the model to ``meta`` for the planner, before other features replace its layers."""
        if self._start is None or self._start.experiment.kind != PROFILE or self._model is not None:
            return root
        require_plannable(model)
        try:
            self._model = without_values(model)
        except Exception as error:  # the model's own __deepcopy__ may raise anything
            raise DeepSpeedConfigError(
                f"deepspeed --autotuning: {type(model).__name__} cannot be copied without its values "
                f"({type(error).__name__}: {error}); keep locks, files and process groups out of its attributes"
            ) from error
        return root

    @override
    def hooks(self, setup: EngineSetup, runtime: ZeroRuntime, groups: Groups, batch_size: int) -> EngineHooks | None:
        start, model, self._start, self._model = self._start, self._model, None, None
        if start is None or start.experiment.kind == RUN:
            return None
        return TuningHooks(start, setup, model)

    @override
    def finish(self, engine: Any, training_data: Any) -> None:
        hooks = engine._hooks.get(__name__)
        if hooks is not None:
            hooks.begin(engine)


FEATURE = TuningFeature()
