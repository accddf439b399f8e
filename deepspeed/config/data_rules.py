"""Contradictions in the keys about training data: curricula, batches by tokens, dropped tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepspeed.config.messages import ConfigMessages, Path
from deepspeed.config.section import Section
from deepspeed.config.sections.data_efficiency import DataEfficiency
from deepspeed.config.sections.root import Root

_OF_TYPE = {
    "fixed_linear": ("total_curriculum_step", "difficulty_step"),
    "fixed_root": ("total_curriculum_step", "difficulty_step", "root_degree"),
    "fixed_discrete": ("difficulty", "max_step"),
    "custom": (),
}
"""The keys that ``schedule_config`` must have, by ``schedule_type``."""


def problems_of(config: Mapping[str, Any]) -> list[tuple[tuple[str, ...], str]]:
    """Returns the problems of a schedule (difficulties, type, config): path below its section, and a sentence."""
    found: list[tuple[tuple[str, ...], str]] = []
    for name in ("min_difficulty", "max_difficulty", "schedule_type"):
        if config.get(name) is None:
            found.append(((name,), "is required, and missing"))
    low, high, kind = (config.get(name) for name in ("min_difficulty", "max_difficulty", "schedule_type"))
    if low is not None and high is not None and low > high:
        found.append((("min_difficulty",), f"{low} is more than max_difficulty {high}"))
    if kind is None:
        return found
    if kind not in _OF_TYPE:
        return [*found, (("schedule_type",), f'"{kind}" is none of {", ".join(_OF_TYPE)}')]
    settings = config.get("schedule_config") or {}
    for name in _OF_TYPE[kind]:
        if settings.get(name) is None:
            found.append((("schedule_config", name), f"is required by schedule_type {kind}, and missing"))
    difficulties, ends = settings.get("difficulty"), settings.get("max_step")
    if kind == "fixed_discrete" and difficulties is not None and ends is not None:
        if len(difficulties) != len(ends) + 1:
            found.append(
                (
                    ("schedule_config", "max_step"),
                    f"expected one entry fewer than difficulty, which has {len(difficulties)}, found {len(ends)}",
                )
            )
        elif sorted(ends) != list(ends):
            found.append((("schedule_config", "max_step"), f"expected steps in rising order, found {ends}"))
    return found


def check_data(root: Root, findings: ConfigMessages) -> None:
    """Reports missing and contradictory keys in the sections about training data."""
    if root.curriculum_learning is not None and root.curriculum_learning.enabled:
        _schedule(root.curriculum_learning, ("curriculum_learning",), findings)
    if root.data_efficiency is not None and root.data_efficiency.enabled:
        check_data_efficiency(root.data_efficiency, findings)


def _schedule(section: Section, at: Path, findings: ConfigMessages) -> None:
    for path, text in problems_of(section.model_dump(exclude_none=True)):
        findings.problem((*at, *path), text)


def check_data_efficiency(section: DataEfficiency, findings: ConfigMessages) -> None:
    """Reports missing and contradictory keys in an enabled section."""
    sampling, at = section.data_sampling, ("data_efficiency", "data_sampling")
    if sampling.enabled and sampling.curriculum_learning.enabled:
        _curriculum_metrics(section, findings)
    if section.packs_tokens:
        batching: Path = (*at, "dynamic_batching")
        if sampling.dynamic_batching.max_tokens is None:
            findings.problem((*batching, "max_tokens"), "is required when dynamic_batching is enabled, and missing")
        if sampling.enabled and sampling.curriculum_learning.enabled:
            findings.problem(
                (*batching, "enabled"),
                "cannot be combined with curriculum_learning: both choose the samples of a batch; keep one",
                (*at, "curriculum_learning", "enabled"),
            )
    if section.data_routing.enabled and section.data_routing.random_ltd.enabled:
        _random_ltd(section, findings)


def _curriculum_metrics(section: DataEfficiency, findings: ConfigMessages) -> None:
    at: Path = ("data_efficiency", "data_sampling", "curriculum_learning", "curriculum_metrics")
    metrics = section.data_sampling.curriculum_learning.curriculum_metrics
    if not metrics:
        findings.problem(at, "at least one metric is required when curriculum_learning is enabled, and none is given")
    for name, metric in metrics.items():
        _schedule(metric, (*at, name), findings)
        if metric.clustering_type == "single_cluster":
            continue
        for key in ("index_to_sample_path", "index_to_metric_path", "difficulty_type"):
            # A percentile is a position in the order of the samples, independent of their values.
            if getattr(metric, key) is None and (key, metric.difficulty_type) != ("index_to_metric_path", "percentile"):
                findings.problem(
                    (*at, name, key),
                    'is required unless clustering_type is "single_cluster" (the metric then only changes the '
                    "batches, in the function of set_data_post_process_func)",
                )


def _random_ltd(section: DataEfficiency, findings: ConfigMessages) -> None:
    at: Path = ("data_efficiency", "data_routing", "random_ltd")
    ltd = section.data_routing.random_ltd
    if ltd.layer_token_lr_schedule.enabled:
        findings.problem(
            (*at, "layer_token_lr_schedule", "enabled"),
            "a learning rate by layer tokens is not supported; set it to false",
        )
    for name in ("total_layer_num", "random_ltd_layer_num", "random_ltd_layer_id"):
        if getattr(ltd, name) is None:
            findings.problem((*at, name), "is required when random_ltd is enabled, and missing")
    if ltd.random_ltd_layer_id is not None and ltd.random_ltd_layer_num not in (None, len(ltd.random_ltd_layer_id)):
        findings.problem(
            (*at, "random_ltd_layer_num"),
            f"{ltd.random_ltd_layer_num} is not the length of random_ltd_layer_id, {len(ltd.random_ltd_layer_id)}",
            (*at, "random_ltd_layer_id"),
        )
    schedule = ltd.random_ltd_schedule
    for path, value in (
        (("min_value",), schedule.min_value),
        (("max_value",), schedule.max_value),
        (("schedule_config", "require_steps"), schedule.schedule_config.require_steps),
        (("schedule_config", "seq_per_step"), schedule.schedule_config.seq_per_step),
    ):
        if value is None:
            findings.problem((*at, "random_ltd_schedule", *path), "is required when random_ltd is enabled, and missing")
