"""A drawn program as data, and how the ends of one are reported."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.harness import run_ranks
from tests.harness.errors import RanksFailed
from tests.random_programs.trial import failure_of

Config = dict[str, Any]
End = tuple[str, str]
"""How a program ended ("equal", "refused", "documented", "different" or "failed"), and a text about it."""


@dataclass(frozen=True)
class Stack:
    """Features that are used together.

    Attributes:
        kind: A name of :data:`tests.random_stacks.kinds.KINDS`.
        seed: The number that it was drawn from.
        world: Ranks; the largest number if it changes.
        config: The ``ds_config``. ``FOLDER`` in it stands for a temporary folder of the run.
        optimizer: The type of the configuration, or "client AdamW" or "client SGD".
        options: Everything else, by name: the model, the layout, the calls.
    """

    kind: str
    seed: int
    world: int
    config: Config
    optimizer: str
    options: dict[str, Any] = field(default_factory=dict)

    def summary(self) -> str:
        """Returns the drawn features in one line: keys of the configuration that are not usual, and options."""
        zero = self.config.get("zero_optimization", {})
        usual = {"train_micro_batch_size_per_gpu", "zero_optimization", "optimizer", "steps_per_print"}
        parts = [f"{self.world} ranks", f"stage {zero.get('stage', 0)}", self.optimizer]
        parts += sorted(key for key in self.config if key not in usual)
        parts += sorted(key.removeprefix("stage3_") for key in zero if key != "stage")
        parts += [f"{key}={value}" for key, value in self.options.items() if value and not isinstance(value, list)]
        return ", ".join(parts)

    def describe(self) -> str:
        """Returns everything that was drawn."""
        return f"{self.kind} {self.seed}: {json.dumps({'world': self.world, **self.options}, default=str)}\n" + (
            json.dumps(self.config)
        )

    def config_in(self, folder: str) -> Config:
        """Returns a copy of the configuration with the folder of the run in it."""
        config: Config = json.loads(json.dumps(self.config).replace('"FOLDER', f'"{folder}'))
        return config


def run_on_ranks(work: Callable[..., End], stack: Stack, folder: str, timeout: float) -> End:
    """Returns how ``work(stack, folder)`` ended on all ranks; they must agree."""
    try:
        ends = run_ranks(work, stack.world, stack, folder, timeout=timeout)
    except RanksFailed as error:
        return failure_of(error)
    kinds = {kind for kind, _ in ends}
    if len(kinds) > 1:
        return "different", "ranks ended differently:\n" + "\n".join(f"rank {n}: {end}" for n, end in enumerate(ends))
    return ends[0]
