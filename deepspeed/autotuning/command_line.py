"""The command line of a start of the user's script with another configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deepspeed.autotuning.experiment import Changes
from deepspeed.config.source import read_source
from deepspeed.errors import DeepSpeedConfigError

_OPTIONS = ("--deepspeed_config", "--deepspeed", "--deepscale_config")


def find_config(arguments: Sequence[str]) -> tuple[int, str, str] | None:
    """Returns place, prefix (``--deepspeed_config=`` or nothing) and path of the configuration in a script's arguments.

    None: the script has its configuration elsewhere, such as in a dict.
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


def read_script_config(arguments: Sequence[str]) -> dict[str, Any] | None:
    """Returns the configuration that a script's arguments name; None where they name none."""
    found = find_config(arguments)
    return None if found is None else dict(read_source(found[2]).data)


def with_config(arguments: Sequence[str], path: Path) -> list[str]:
    """Returns a script's arguments with another file in the place of its configuration."""
    made, found = list(arguments), find_config(arguments)
    if found is not None:
        place, prefix, _ = found
        made[place] = f"{prefix}{path}"
    return made


def with_mapped(arguments: Sequence[str], mappings: Mapping[str, Any] | None, changes: Changes) -> list[str]:
    """Returns a script's arguments with the values that ``autotuning.arg_mappings`` carries over.

    Args:
        arguments: Of the script.
        mappings: From a key of the configuration (dotted below a section) to an argument such as
            ``--per_device_train_batch_size``.
        changes: Of the candidate.

    Raises:
        DeepSpeedConfigError: A mapping is no option.
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
