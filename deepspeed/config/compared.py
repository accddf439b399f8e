"""The values of a configuration that must be the same on all ranks."""

from __future__ import annotations

from typing import Any

from deepspeed.config.sections.root import Root

# What a rank writes, shows or measures is its own affair, and so is where its files lie.
_OWN_AFFAIRS = frozenset(
    {
        "comet",
        "comms_logger",
        "csv_monitor",
        "dump_state",
        "flops_profiler",
        "log_level",
        "memory_breakdown",
        "run_report",
        "steps_per_print",
        "tensorboard",
        "timers",
        "trace",
        "wall_clock_breakdown",
        "wandb",
    }
)
_OWN_NAMES = frozenset({"nvme_path"})


def compared_values(root: Root) -> dict[str, Any]:
    """Value per dotted key, without those that may differ between ranks."""
    flat: dict[str, Any] = {}
    for name, value in root.model_dump(mode="python").items():
        if name not in _OWN_AFFAIRS:
            _flatten(name, value, flat)
    return flat


def _flatten(path: str, value: Any, flat: dict[str, Any]) -> None:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            if name not in _OWN_NAMES:
                _flatten(f"{path}.{name}", inner, flat)
    else:
        flat[path] = value
