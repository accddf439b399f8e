"""The file through which the command passes an experiment to the ranks of the script; an environment variable names it.

This module does not import torch, because the command reads and writes these files too.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from deepspeed.config.sections.autotuning import TUNING_VARIABLE

PROFILE, TRIAL, RUN = "profile", "trial", "run"
MICRO, ACCUMULATION, TOTAL = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"
STAGE = "zero_optimization.stage"
_LISTED = (MICRO, TOTAL, "tensor_parallel.autotp_size", "sequence_parallel_size", "expert_parallel.autoep_size")
_LISTS_OF_THEIR_OWN = ("ignore_unused_parameters", "leaf_module", "zenflow")

Changes = dict[str, Any]
"""Values of a configuration by dotted path; None removes the key."""


@dataclass(frozen=True)
class Experiment:
    """One start of the user's script."""

    name: str  # the experiment's name, also of its folder
    kind: str  # ``profile`` (the ranks plan all candidates), ``trial`` (one candidate is measured), or ``run`` (trains)
    folder: str  # path of the folder with its files
    changes: Changes = field(default_factory=dict)  # differences from the script's configuration
    # for a profile, the candidate values of each key, by dotted path; an empty list stands for ``"auto"``
    choices: dict[str, list[Any]] = field(default_factory=dict)
    section: dict[str, Any] = field(default_factory=dict)  # for a profile, the section ``autotuning``
    first_step: int = 3  # first update that is measured, counted from 1
    last_step: int = 12  # last update that is measured; the script ends after it
    ranks_per_node: int = 0  # ranks on each node of the job; 0: all ranks are on one node

    @property
    def path(self) -> Path:
        """The file that the ranks read."""
        return Path(self.folder) / "exp.json"

    def write(self, **further: Any) -> None:
        """Writes the attributes and the values of ``further`` to :attr:`path`."""
        Path(self.folder).mkdir(parents=True, exist_ok=True)
        write_json(self.path, {**asdict(self), **further})

    @classmethod
    def read(cls, path: str | Path) -> Experiment:
        """Reads a file of :meth:`write`."""
        facts = json.loads(Path(path).read_text(encoding="utf-8"))
        return cls(**{name: facts[name] for name in cls.__dataclass_fields__ if name in facts})


def take_experiment() -> Experiment | None:
    """Returns the experiment of this process at the first call; None at later calls, or without one.

    So only the first engine of a script is tuned; engines that it builds later use their own configuration.
    """
    path = os.environ.pop(TUNING_VARIABLE, None)
    return None if path is None else Experiment.read(path)


def write_json(path: Path, values: Any) -> None:
    """Writes a JSON file atomically: no reader sees a partial file."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")  # several ranks may write at the same time
    part.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    part.replace(path)


def applied(config: Mapping[str, Any], changes: Changes) -> dict[str, Any]:
    """Returns a copy of a configuration with ``changes`` applied and the section ``autotuning`` removed."""
    made = copy.deepcopy(dict(config))
    made.pop("autotuning", None)
    for path, value in changes.items():
        *outer, name = path.split(".")
        section = made
        for part in outer:
            inner = section.get(part)
            section[part] = section = dict(inner) if isinstance(inner, Mapping) else {}
        if value is None:
            section.pop(name, None)
        else:
            section[name] = copy.deepcopy(value)
    return made


def get(config: Mapping[str, Any], path: str) -> Any:
    """Returns the value at a dotted path; None if there is none."""
    found: Any = config
    for part in path.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def split_choices(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Returns a configuration with the first value of each list of candidates, and the lists by path.

    Lists of candidates are allowed for batch sizes, degrees of axes, and keys of ``zero_optimization``. For these keys,
    ``"auto"`` stays in the configuration and gets an empty list. The stage ``"all"`` stands for the list 0 to 3.
    """
    zero = config.get("zero_optimization")
    paths = [f"zero_optimization.{name}" for name in zero] if isinstance(zero, Mapping) else []
    paths = [path for path in paths if path.split(".")[1] not in _LISTS_OF_THEIR_OWN]
    choices: dict[str, list[Any]] = {}
    for path in (*_LISTED, *paths):
        value = get(config, path)
        if path == STAGE and value == "all":
            value = [0, 1, 2, 3]
        if isinstance(value, list) and value:
            choices[path] = value
        elif value == "auto":
            choices[path] = []
    made = copy.deepcopy(dict(config))
    section = made.get("autotuning")
    made = applied(made, {path: values[0] for path, values in choices.items() if values})
    return {**made, **({"autotuning": section} if section is not None else {})}, choices
