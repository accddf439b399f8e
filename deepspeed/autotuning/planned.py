"""Plans candidates in a rank of the script: predicts whether each fits in memory, and its time per update."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from deepspeed.autotuning.candidates import CandidateGroup, CandidateSpace
from deepspeed.autotuning.choice import FIRST_ERROR, CandidatePlan
from deepspeed.autotuning.experiment import Changes, applied
from deepspeed.errors import DeepSpeedConfigError, DeepSpeedError
from deepspeed.nested import map_tensors, tensors_of
from deepspeed.plan.machine import Machine
from deepspeed.plan.memory import META
from deepspeed.plan.models import ModelSource, model_source
from deepspeed.plan.planner import make_plan
from deepspeed.plan.result import Plan, Request
from deepspeed.plan.timeline.timed_step import time_step

_LONGEST_START = 2e-3  # seconds that the host may take to start one operation
_REFINED = 3  # candidates that are also planned with other bucket sizes
_WORTH_A_RANK = 2.0  # seconds of processor time that must be left for each further planning rank


@dataclass(frozen=True)
class InputSpec:
    """The inputs of one micro-batch of the script's model, without values."""

    args: tuple[Any, ...]  # positional arguments, with tensors on ``meta``
    kwargs: dict[str, Any]  # keyword arguments, with tensors on ``meta``

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> InputSpec:
        """Returns the spec of the arguments of a forward, without their values."""
        return cls(map_tensors(tuple(args), _on_meta), map_tensors(dict(kwargs), _on_meta))

    @property
    def samples(self) -> int:
        """Size of the first dimension of the first tensor; 0 without a tensor."""
        return next((tensor.shape[0] for tensor in tensors_of((self.args, self.kwargs)) if tensor.dim()), 0)

    @property
    def sequence_length(self) -> int:
        """Size of the second dimension of the first integer tensor; 1 without one."""
        ids = (t for t in tensors_of((self.args, self.kwargs)) if t.dim() > 1 and not t.is_floating_point())
        return next((tensor.shape[1] for tensor in ids), 1)

    def maker(self, model: nn.Module) -> Callable[[int, int], Any]:
        """Returns a function from micro-batch and sequence length to the arguments of the model's forward, on ``meta``.

        The sequence length is ignored: it stays the one of the spec.
        """
        args, kwargs, samples = self.args, self.kwargs, self.samples

        def make(micro_batch: int, _sequence_length: int) -> Any:
            if not kwargs:
                return _resized(args, samples, micro_batch)
            named = inspect.signature(model.forward).bind(*args, **kwargs)
            flat = {name: value for name, value in named.arguments.items() if name not in ("kwargs", "args")}
            return _resized({**flat, **named.arguments.get("kwargs", {})}, samples, micro_batch)

        return make


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device=META).detach()


def _resized(value: Any, before: int, now: int) -> Any:
    def resize(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() == 0 or tensor.shape[0] != before:
            return tensor
        return torch.zeros(now, *tensor.shape[1:], dtype=tensor.dtype, device=META)

    return map_tensors(value, resize)


@dataclass
class CandidatePlanner:
    """Plans candidates of one script."""

    model: nn.Module  # the script's model, on ``meta``
    inputs: InputSpec  # the inputs of one micro-batch
    config: dict[str, Any]  # the script's configuration
    machine: Machine  # the machine, with measured rates
    kind: str  # device type: ``cpu`` or ``cuda``
    outside: float = 0.0  # seconds per update that the script spends outside of the engine
    _source: ModelSource = field(init=False)

    def __post_init__(self) -> None:
        self._source = model_source(self.model, self.inputs.maker(self.model))

    def plan(self, changes: Changes) -> Plan:
        """Plans one candidate; raises DeepSpeedError where it cannot run."""
        request = Request(
            source=self._source,
            config=applied(self.config, changes),
            machine=self.machine,
            sequence_length=self.inputs.sequence_length,
            kind=self.kind,
        )
        return make_plan(request, compare=False)

    def calibrate(self, changes: Changes, seconds: float) -> float:
        """Adjusts the machine so that predicted equals measured time of an update; returns measured over predicted.

        First raises the launch time of an operation, because it differs most between programs (hooks, Python). One
        factor on all operations then accounts for the rest.
        """
        plan = self.plan(changes)
        before = self._seconds(plan, self.machine)
        least, most = self.machine.device.efficiency.launch, _LONGEST_START
        for _ in range(20):
            middle = (least + most) / 2
            if self._seconds(plan, self._with(launch=middle)) < seconds:
                least = middle
            else:
                most = middle
        self.machine = self._with(launch=least)
        now = self._seconds(plan, self.machine)
        if now > 0:
            self.machine = self._with(factor=self.machine.device.efficiency.factor * seconds / now)
        return seconds / before if before > 0 else 1.0

    def _with(self, **shares: float) -> Machine:
        device = self.machine.device
        return replace(self.machine, device=replace(device, efficiency=replace(device.efficiency, **shares)))

    def _seconds(self, plan: Plan, machine: Machine) -> float:
        trace, steps = plan.simulated.trace, plan.accumulation_steps
        return time_step(trace, machine, steps, is_asynchronous=self.kind != "cpu").seconds

    # -- many --------------------------------------------------------------------------------------------------------

    def candidate(self, space: CandidateSpace, setting: CandidateGroup, micro: int) -> CandidatePlan:
        """Returns a candidate with its predictions."""
        changes, name = space.changes(setting, micro), space.name(setting, micro)
        try:
            plan = self.plan(changes)
        except DeepSpeedError as error:
            return CandidatePlan(name, changes, refusal=str(error))
        return CandidatePlan(
            name,
            changes,
            fits=plan.fits,
            device_bytes=plan.device_bytes,
            usable_bytes=plan.machine.usable,
            seconds=self._seconds(plan, self.machine) + self.outside,
            flops=plan.simulated.flow.flops,
        )

    def plan_all(
        self, space: CandidateSpace, settings: Sequence[CandidateGroup], *, refine: bool
    ) -> list[dict[str, Any]]:
        """Plans the candidates of some groups; where one does not fit, also of the groups that need less memory.

        Returns the fields of each :class:`CandidatePlan`, and ``plan_seconds``. ``refine``: also plan the best
        candidates with other bucket sizes, if these change the prediction.
        """
        found: list[tuple[CandidateGroup, int, CandidatePlan, float]] = []
        for setting in settings:
            found += self._of_setting(space, setting)
        if refine:
            best = sorted((entry for entry in found if entry[2].fits), key=lambda entry: entry[2].seconds)[:_REFINED]
            for setting, micro, base, _ in best:
                others = [self._timed(space, other, micro) for other in space.refined(setting)]
                # A bucket larger than all gradients, for example, changes nothing.
                facts = attrgetter("refusal", "seconds", "device_bytes")
                found += [entry for entry in others if facts(entry[2]) != facts(base)]
        return [{**asdict(candidate), "plan_seconds": round(took, 3)} for _, _, candidate, took in found]

    def _timed(
        self, space: CandidateSpace, setting: CandidateGroup, micro: int
    ) -> tuple[CandidateGroup, int, CandidatePlan, float]:
        start = time.perf_counter()
        return setting, micro, self.candidate(space, setting, micro), time.perf_counter() - start

    def _of_setting(
        self, space: CandidateSpace, setting: CandidateGroup, *, relieve: bool = True
    ) -> list[tuple[CandidateGroup, int, CandidatePlan, float]]:
        """Plans micro-batches in descending order until two in a row are slower, or one by more than the error bar."""
        found = []
        best, slower, largest_fits = float("inf"), 0, None
        for micro in space.micro_batches(setting):
            entry = self._timed(space, setting, micro)
            found.append(entry)
            candidate = entry[2]
            if candidate.refusal:
                if len(found) > 1 or not relieve:
                    break  # the cause is not the micro-batch size
                continue
            largest_fits = candidate.fits if largest_fits is None else largest_fits
            if candidate.fits:
                slower = slower + 1 if candidate.seconds >= best else 0
                if slower == 2 or candidate.seconds * (1 - FIRST_ERROR) >= best:
                    break
                best = min(best, candidate.seconds)
        if relieve and largest_fits is False:
            for other in space.relieved(setting):
                found += self._of_setting(space, other, relieve=False)
        return found


def ranks_that_plan(settings: int, seconds: float, ranks: int, *, refine: bool) -> int:
    """Returns over how many ranks of a node the plans of some groups (of ``seconds`` each) are divided.

    The first plan of a process imports torch's compiler, which takes 1.4 seconds of processor time, so a further rank
    must save more than that.
    """
    plans = 2 * settings + (_REFINED * 4 if refine else 0)
    return min(max(int(plans * seconds / _WORTH_A_RANK), 1), ranks, settings)


def require_plannable(model: nn.Module) -> None:
    """Raises DeepSpeedConfigError for a model with pipeline stages, a ``PipelineModule``."""
    if getattr(type(model), "is_pipeline", False):
        raise DeepSpeedConfigError(
            "deepspeed --autotuning: the model is a PipelineModule, whose stages are cut before the configuration is "
            "read; compare pipelines with ds_plan --sweep pipe=1,2 micro_batch=1,2,4"
        )
