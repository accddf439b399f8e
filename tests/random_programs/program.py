"""A training program as data: a model, an optimizer, and phases that each have a layout of ranks and some actions."""

from dataclasses import dataclass
from typing import Any

Options = tuple[tuple[str, Any], ...]
"""Keyword arguments as sorted pairs, so that a program can be compared and printed."""


@dataclass(frozen=True)
class Place:
    """Coordinates of a rank; the tensor axis is fastest."""

    pipe: int
    data: int
    sequence: int
    tensor: int


@dataclass(frozen=True)
class Layout:
    """Numbers of ranks along each axis, and what is sharded, in a phase.

    Attributes:
        world: Ranks.
        stage: ZeRO stage.
        pipe: Pipeline stages; 0 is an engine without a pipeline.
        tensor: Ranks that share layers.
        sequence: Ranks that share a sequence.
        mode: How they do: "ulysses", "ring" or "both".
        experts: Ranks that share experts.
        zero: Further keys of ``zero_optimization``.
        schedule: Of a pipeline.
        recompute: Layers per recomputed block of a pipeline; 0 is none.
    """

    world: int
    stage: int
    pipe: int = 0
    tensor: int = 1
    sequence: int = 1
    mode: str = "ulysses"
    experts: int = 1
    zero: Options = ()
    schedule: str = "1f1b"
    recompute: int = 0

    @property
    def data(self) -> int:
        """Returns the number of ranks with different samples."""
        return self.world // (max(self.pipe, 1) * self.tensor * self.sequence)

    def place(self, rank: int) -> Place:
        """Returns the coordinates of a rank."""
        rank, tensor = divmod(rank, self.tensor)
        rank, sequence = divmod(rank, self.sequence)
        pipe, data = divmod(rank, self.data)
        return Place(pipe, data, sequence, tensor)


@dataclass(frozen=True)
class Action:
    """Something done before a step, or inside it.

    Attributes:
        name: One of :data:`tests.random_programs.draw.ACTIONS`.
        step: Number of the step in its phase.
        salt: Chooses the parameters that it is about.
    """

    name: str
    step: int
    salt: int = 0


@dataclass(frozen=True)
class Phase:
    """Steps of one engine. Every phase but the first begins with the checkpoint of the one before."""

    layout: Layout
    accumulation: int
    steps: int
    actions: tuple[Action, ...] = ()
    compiled: bool = False

    def has(self, name: str, step: int) -> bool:
        """Returns whether a step has this action."""
        return any(action.name == name and action.step == step for action in self.actions)

    def at(self, step: int) -> list[Action]:
        """Returns the actions of a step."""
        return [action for action in self.actions if action.step == step]


@dataclass(frozen=True)
class Model:
    """What is trained.

    Attributes:
        kind: "own", "row" (a pipeline's layers), "llama", "gpt2" or "mixtral".
        options: Sizes and features, see :mod:`tests.random_programs.models`.
    """

    kind: str
    options: Options

    @property
    def given(self) -> dict[str, Any]:
        """The options by name."""
        return dict(self.options)

    @property
    def is_transformers(self) -> bool:
        return self.kind in ("llama", "gpt2", "mixtral")


@dataclass(frozen=True)
class Optimizer:
    """How parameters are updated.

    Attributes:
        name: A class of ``torch.optim``.
        params: Its arguments.
        by_config: Named in the configuration instead of built by the program.
        groups: Param groups, of which each has a learning rate of its own.
        with_frozen: Groups hold frozen parameters too.
        schedule: A class of ``torch.optim.lr_scheduler``, or nothing.
        schedule_params: Its arguments.
    """

    name: str
    params: Options
    by_config: bool
    groups: int
    with_frozen: bool
    schedule: str = ""
    schedule_params: Options = ()


@dataclass(frozen=True)
class Program:
    """A whole training program. ``seed`` is the number that it was drawn from."""

    seed: int
    model: Model
    optimizer: Optimizer
    precision: str
    clip: float
    phases: tuple[Phase, ...]

    def describe(self) -> str:
        """Returns a line per part."""
        lines = [f"seed {self.seed}: {self.model.kind} {self.model.given}, {self.precision}, clip {self.clip}"]
        lines.append(f"  {self.optimizer}")
        lines += [f"  {phase}" for phase in self.phases]
        return "\n".join(lines)
