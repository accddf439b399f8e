"""Refuses the keys of features that do not exist yet (:data:`deepspeed.features.FEATURES`)."""

from __future__ import annotations

from typing import Any

from deepspeed.config.findings import Findings, Path, shown
from deepspeed.config.sections.root import Root
from deepspeed.features import FEATURES


def value_at(root: Root, path: Path) -> Any:
    """The value of a key; None when a section on the way is absent."""
    value: Any = root
    for part in path:
        if value is None:
            return None
        value = getattr(value, str(part))
    return value


def refuse_unavailable(root: Root, findings: Findings) -> None:
    """Reports every key that switches a missing feature on."""
    stage = root.zero_optimization.stage
    for feature in FEATURES:
        for key in feature.keys:
            value = value_at(root, key.path)
            if value is None or not key.switched_on(value) or (stage == 0 and key.idle_at_stage_0):
                continue
            is_section = hasattr(value, "model_fields_set")
            findings.problem(key.path, feature.refusal(key, "" if is_section else shown(value)))
