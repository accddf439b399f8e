"""The base class of features, which subpackages add to an engine if a configuration or a model requests them.

A feature is an object named ``FEATURE`` in the module ``feature`` of its subpackage. ``deepspeed.engine.features``
lists these modules in the order in which they change a model. It imports only those that are requested: by a section
of the configuration (:func:`~deepspeed.config.section.features_of`), by an axis of the job's mesh, or by a mark on
the classes of the model, the mpu or the optimizer (:func:`marks_of`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from deepspeed.axes import KEYS, SEQUENCE, TENSOR
from deepspeed.comm.job.job import Job
from deepspeed.comm.job.mpu import RankCoordinates
from deepspeed.config.sections.root import Root
from deepspeed.errors import DeepSpeedConfigError

if TYPE_CHECKING:
    from deepspeed.zero.group import Groups
    from deepspeed.zero.runtime import ZeroRuntime
    from deepspeed.zero.update.driver import UpdateDriver

MARK = "_ds_features"
"""Attribute of classes and objects with the features that they request, as a tuple of names of modules."""

_BY_METHOD = {"set_deepspeed_parallelism": "deepspeed.parallel.expert.feature"}
"""Methods of programs' classes that request a feature: this one needs the groups of experts."""


def mark(thing: Any, feature: str) -> None:
    """Marks an object with a ``__dict__``, such as a module of a model, so that it requests a feature."""
    known: tuple[str, ...] = thing.__dict__.get(MARK, ())
    thing.__dict__[MARK] = tuple(dict.fromkeys((*known, feature)))


def marks_of(*things: Any) -> set[str]:
    """Returns the features that objects request, by their own marks or those of their classes and base classes."""
    found: set[str] = set()
    classes: set[type] = set()
    for thing in things:
        for one in thing.modules() if isinstance(thing, nn.Module) else (thing,):
            found.update(getattr(one, "__dict__", {}).get(MARK, ()))
            classes.add(type(one))
    for base in {base for kind in classes for base in kind.__mro__}:
        found.update(base.__dict__.get(MARK, ()))
        found.update(feature for method, feature in _BY_METHOD.items() if method in base.__dict__)
    return found


@dataclass(frozen=True)
class EngineSetup:
    """Describes the engine to be built, before anything is changed."""

    job: Job  # the job whose ranks train together
    root: Root  # the configuration
    model: nn.Module
    optimizer: Any  # the argument of ``initialize``
    ranks: RankCoordinates
    device: torch.device  # the device that the model is moved to
    mesh_is_ours: bool = True  # the configuration sets the ranks that share a sequence, not the caller's mpu

    @property
    def has_stages(self) -> bool:
        """Whether the model is a ``PipelineModule``."""
        return bool(getattr(type(self.model), "is_pipeline", False))


Test = Callable[[EngineSetup], bool]


@dataclass(frozen=True)
class ConflictKey:
    """Something that features may conflict with, such as pipelines."""

    title: str  # its name in the table of the documentation
    words: Callable[[EngineSetup], str | None]  # returns its description for messages if it is active, otherwise None


def _shared_sequences(setup: EngineSetup) -> str | None:
    size = setup.ranks.sequence_size
    return f"where {size} ranks share a sequence ({KEYS[SEQUENCE]})" if size > 1 else None


def _shared_layers(setup: EngineSetup) -> str | None:
    size = setup.ranks.mesh.size(TENSOR)
    return f"where {size} ranks share a layer ({KEYS[TENSOR]})" if size > 1 else None


def _islands(setup: EngineSetup) -> str | None:
    has_islands = setup.root.communication_compression.islands is not None
    return "with communication_compression.islands" if has_islands else None


def _experts(setup: EngineSetup) -> str | None:
    section = setup.root.expert_parallel
    marked = any(getattr(parameter, "allreduce", True) is False for parameter in setup.model.parameters())
    has_experts = marked or (section is not None and section.enabled)
    return "with experts that are spread over ranks" if has_experts else None


SEQUENCE_RANKS = ConflictKey("sequence parallelism", _shared_sequences)
TENSOR_RANKS = ConflictKey("tensor parallelism", _shared_layers)
STAGES = ConflictKey("pipeline", lambda setup: "with a PipelineModule" if setup.has_stages else None)
ISLANDS = ConflictKey("islands", _islands)
STAGE_3 = ConflictKey(
    "ZeRO stage 3", lambda setup: "with zero_optimization.stage 3" if setup.root.zero_optimization.stage == 3 else None
)
EXPERTS = ConflictKey("spread experts", _experts)
OTHERS = (STAGES, TENSOR_RANKS, SEQUENCE_RANKS, EXPERTS, ISLANDS, STAGE_3)
"""The columns of the table of conflicts in the documentation."""


@dataclass(frozen=True)
class Conflict:
    """A setting that cannot be combined with something else; ``initialize`` refuses both together."""

    part: str  # the setting of the feature, as messages name it
    is_on: Test  # returns whether that setting is used
    other: ConflictKey  # what it cannot be combined with
    why: str  # the reason, for messages
    instead: str  # what to change, for messages

    def problem(self, setup: EngineSetup) -> str | None:
        """Returns the message if both are used, otherwise None."""
        words = self.other.words(setup) if self.is_on(setup) else None
        return f"{self.part} {words}: {self.why}; {self.instead}" if words is not None else None


def refuse_conflicts(conflicts: Iterable[Conflict], setup: EngineSetup) -> None:
    """Raises DeepSpeedConfigError with the messages of all conflicts whose two sides are used."""
    problems = tuple(problem for conflict in conflicts if (problem := conflict.problem(setup)) is not None)
    if problems:
        raise DeepSpeedConfigError("\n".join(problems), problems)


def takes_keyword(model: nn.Module, name: str, *, by_name: bool = False) -> bool:
    """Returns whether the forward of ``model`` takes a keyword; with ``by_name``, ``**kwargs`` do not count."""
    parameters = inspect.signature(model.forward).parameters
    any_name = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    return name in parameters or (any_name and not by_name)


@dataclass(frozen=True)
class StepInfo:
    """Describes one update after it has run."""

    step: int  # number of the update, from 1
    samples: int  # number of samples so far, over all ranks
    batch: int  # number of samples of this update, over all ranks
    own_batch: int  # number of samples of this update on this rank
    skipped: int  # number of skipped updates so far
    lr: list[float]  # learning rate of each param group, after the schedule has advanced
    norm: float | None  # norm of the gradients before clipping; None if it was not computed
    loss_scale: float | None  # the loss scale under fp16; None otherwise
    more: Sequence[tuple[str, float]] = ()  # names and values of further events


SCHEDULE = "schedule"
"""The phase of all instructions of a pipeline stage. Forward, backward and step are phases inside it."""


class StepTracker:
    """Records the phases and steps of one rank; the methods of this base class do nothing.

    Attributes:
        uses_loss: Whether :meth:`end_step` uses the loss.
        uses_events: Whether it uses the events of features.
    """

    uses_loss = uses_events = False

    def begin(self, phase: str) -> None:
        """Records the start of a phase (forward, backward, step, ...); phases may be nested."""

    def end(self, phase: str) -> None:
        """Records the end of a phase."""

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Records a phase that lasts as long as the context."""
        self.begin(phase)
        try:
            yield
        finally:
            self.end(phase)

    def named(self, name: str) -> AbstractContextManager[None]:
        """Returns a context for a part of a phase, such as one micro-batch of a pipeline stage."""
        return nullcontext()

    def add_tokens(self, count: int) -> None:
        """Adds the number of tokens of a micro-batch of this rank."""

    def event(self, name: str, **values: Any) -> None:
        """Records an event beside the steps, such as a save."""

    def take_memory(self, rows: Callable[[], Sequence[tuple[str, int, int, str]]]) -> None:
        """Called after each update with a function that returns the rows of ``engine.memory_report()``."""

    def end_step(self, info: StepInfo, loss: torch.Tensor | None) -> None:
        """Called after each update with its loss, 0-dim, on any device; None if unknown or without ``uses_loss``."""

    def close(self) -> None:
        """Closes the tracker. Called when the engine is destroyed; may be called twice."""


class TrainingGroup:
    """The data-parallel ranks that train together: all of them, unless a feature divides them.

    Args:
        inside: This rank's coordinates among the ranks that train together.
        coordinates: The same, with the group over which all samples of the job are distributed.
    """

    is_divided = False  # whether there are several groups, of which the first writes checkpoints
    has_updates = False  # whether this group has made updates since groups exchanged their masters

    def __init__(self, inside: RankCoordinates, coordinates: RankCoordinates) -> None:
        self.inside, self.coordinates = inside, coordinates

    def driver_around(self, inner: UpdateDriver) -> UpdateDriver:
        """Returns the update driver that adds the exchange between groups to that of the optimizer."""
        return inner

    def by_one(self, what: str, action: Callable[[], Any]) -> Any:
        """Exchanges masters, then runs ``action`` on the first group. Every rank must call it.

        Args:
            what: Names the action in messages.

        Returns:
            The result of ``action``; None on other groups.
        """
        return action()


class UnevenBatch(Protocol):
    """The micro-batches of this rank in one update in which ranks have different numbers of micro-batches."""

    setting: str  # the key that allows such updates, for messages

    def weigh(self, loss: torch.Tensor) -> torch.Tensor:
        """Returns ``loss`` (0-dim), scaled so that the mean of gradients over ranks is the mean over micro-batches."""
        ...

    def numbers(self) -> Sequence[float]:
        """Returns numbers that the update sends to all ranks; their count is equal on all ranks."""
        ...

    def take(self, rows: torch.Tensor) -> None:
        """Takes the results of :meth:`numbers` of all ranks: fp64, ``[ranks, numbers]``."""
        ...


class EngineHooks:
    """Hooks of a feature in the steps of one engine; the methods of this base class do nothing."""

    # records the engine's phases and steps on this rank; None: they are not recorded
    tracker: StepTracker | None = None
    # objects that attributes of the engine return, by the attribute's name
    exposed: Mapping[str, Any] = MappingProxyType({})
    # objects whose ``state_dict()`` a checkpoint has, equal on all ranks, by its key there (``checkpoint.states``);
    # their ``load_state_dict`` gets None from a checkpoint without
    states: Mapping[str, Any] = MappingProxyType({})
    # whether the ranks of a pipeline stage gather sharded parameters in one order, whatever their samples are, also
    # where a backward computes the gradients of weights later than those of inputs
    gathers_alike: bool = True

    def before_forward(self, *, is_training: bool, global_steps: int, micro_steps: int) -> dict[str, Any]:
        """Called before each forward, on every rank alike; returns further keyword arguments of the model's forward."""
        return {}

    def before_backward(self, loss: torch.Tensor, scale: float, global_steps: int) -> None:
        """Called before a backward from ``loss`` (0-dim, times ``scale``) that an update follows."""

    @property
    def needs_graph(self) -> bool:
        """Whether :meth:`before_backward` uses the graph of the loss."""
        return False

    @property
    def runs_backward(self) -> bool:
        """Whether the present backward pass computes gradients for the feature itself, not for the training."""
        return False

    @property
    def uneven_batch(self) -> UnevenBatch | None:
        """The micro-batches of the current update if ranks have different numbers of them; else None."""
        return None

    def before_update(self, global_steps: int, *, has_run_backward: bool) -> None:
        """Called before each update."""

    def after_update(self, global_steps: int, *, was_skipped: bool) -> None:
        """Called after each update; ``global_steps`` counts it. ``was_skipped``: a gradient was not finite."""

    def after_step(self, global_steps: int) -> None:
        """Called at the end of each step with an update, when the engine can be saved. It may end the process."""

    def close(self) -> None:
        """Releases resources such as signal handlers. Called when the engine is destroyed; may be called twice."""

    def resume(self, global_steps: int, skipped_steps: int) -> None:
        """Sets the state after this many updates; called when a checkpoint was loaded."""

    def events(self) -> Sequence[tuple[str, float]]:
        """Returns names and values for the monitors."""
        return ()


class TrackingHooks(EngineHooks):
    """Base class of hooks that only record phases and steps."""

    def __init__(self, tracker: StepTracker) -> None:
        self.tracker = tracker


class EngineFeature:
    """A feature of an engine; the methods of this base class do nothing."""

    title: str  # its name in the documentation
    setting: str  # the setting that enables it
    conflicts: tuple[Conflict, ...] = ()  # what it cannot be combined with
    # whether it does not change the training, so that it can be combined with every other feature
    only_watches: bool = False
    # modules of the only features that it can be combined with, beside those that only watch; None: all but conflicts
    goes_with: tuple[str, ...] | None = None

    def read_config(self, config: Any, mpu: Any) -> Any:
        """Returns the ``config`` argument of ``initialize``, changed as the feature's mpu requires."""
        return config

    def complete(self, root: Root, model: nn.Module, mpu: Any) -> Root:
        """Returns the configuration, completed by settings that the program made on the model."""
        return root

    def prepare(self, setup: EngineSetup) -> None:
        """Gives the model layers that other features read. Every rank must call it."""

    def refuse(self, setup: EngineSetup) -> None:
        """Checks the setup before any change. Raises DeepSpeedConfigError: the feature cannot be used with it."""

    def divide(self, setup: EngineSetup) -> TrainingGroup | None:
        """Returns how the data-parallel ranks are divided; None: they train together. Every rank must call it."""
        return None

    def reshape(self, setup: EngineSetup) -> Mapping[int, nn.Parameter]:
        """Changes the model before ZeRO. Every rank must call it. Returns new parameters by ``id`` of old ones."""
        return {}

    def settle(self, setup: EngineSetup) -> Mapping[str, bool]:
        """Groups and ties parameters, once all features have changed the model. Every rank must call it.

        Returns:
            Groups of parameters that are sharded by themselves, by name: whether this rank counts among those that
            have them alike.
        """
        return {}

    def engine_class(self, setup: EngineSetup) -> str | None:
        """Returns the dotted name of the engine's class; None: the default one."""
        return None

    def hooks(self, setup: EngineSetup, runtime: ZeroRuntime, groups: Groups, batch_size: int) -> EngineHooks | None:
        """Returns the feature's hooks in an engine, or None; ``batch_size`` counts samples of all ranks."""
        return None

    def finish(self, engine: Any, training_data: Any) -> None:
        """Called when the engine is complete. Every rank must call it."""
