"""Old spellings of keys: each is translated with one warning, and refused together with the new one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from deepspeed.config.messages import ConfigMessages, Path, dotted, shown
from deepspeed.config.types import to_bool, to_float
from deepspeed.logging import warn_once


@dataclass(frozen=True)
class OldKey:
    """An old spelling."""

    old: Path
    new: tuple[Path, ...]  # the keys that get its value; several get the same value
    about: str  # its replacement, in words, for the reference
    # makes the new value; raises ValueError for a value the old key could not have
    convert: Callable[[Any], Any] | None = None
    expects: str = ""  # valid values of the old key, for the message when ``convert`` refuses
    neutral: tuple[Any, ...] = ()  # new values that mean the same as the default; no warning is logged for them
    same_section: bool = False  # whether the old name held a whole section of the same shape


_ZERO = "zero_optimization"
_CLIPPING = "gradient_clipping"


def _device(value: Any) -> dict[str, str] | None:
    return {"device": "cpu"} if to_bool(value) else None


def _max_grad_norm(value: Any) -> float | None:
    limit = to_float(value)
    if limit < 0:
        raise ValueError("negative")
    return limit or None


OLD_KEYS: tuple[OldKey, ...] = (
    OldKey(("bfloat16",), (("bf16",),), "The name of the section bf16 before 0.6.", same_section=True),
    OldKey(
        (_ZERO, "cpu_offload"),
        ((_ZERO, "offload_optimizer"),),
        "true is offload_optimizer: {device: cpu}.",
        _device,
        "true or false",
    ),
    OldKey(
        (_ZERO, "cpu_offload_param"),
        ((_ZERO, "offload_param"),),
        "true is offload_param: {device: cpu}.",
        _device,
        "true or false",
    ),
    OldKey(
        (_ZERO, "cpu_offload_params"),
        ((_ZERO, "offload_param"),),
        "true is offload_param: {device: cpu}.",
        _device,
        "true or false",
    ),
    OldKey(
        (_ZERO, "stage3_gather_fp16_weights_on_model_save"),
        ((_ZERO, "stage3_gather_16bit_weights_on_model_save"),),
        "Renamed when bf16 came.",
        neutral=(False,),
    ),
    OldKey(
        (_ZERO, "find_unused_parameters"),
        ((_ZERO, "ignore_unused_parameters"),),
        "The opposite of ignore_unused_parameters.",
        lambda value: not to_bool(value),
        "true or false",
        neutral=(True,),
    ),
    OldKey((_ZERO, "allgather_size"), ((_ZERO, "allgather_bucket_size"),), "Renamed.", neutral=(500_000_000,)),
    OldKey(
        (_ZERO, "offload_optimizer", "pipeline"),
        ((_ZERO, "offload_optimizer", "pipeline_read"), (_ZERO, "offload_optimizer", "pipeline_write")),
        "Now two keys.",
        neutral=(False,),
    ),
    OldKey(("bf16", "check_overflow"), (("bf16", "check_grad_overflow"),), "Renamed.", neutral=(True,)),
    OldKey(("fp16", "fp16"), (("fp16", "enabled"),), "Renamed.", neutral=(False,)),
    OldKey(
        ("fp32_allreduce",),
        (("communication_data_type",),),
        "true is communication_data_type: fp32 (up to 0.5.7).",
        lambda value: "fp32" if to_bool(value) else None,
        "true or false",
    ),
    OldKey(
        ("seq_parallel_comm_data_type",),
        (("seq_parallel_communication_data_type",),),
        "Renamed in 0.16.5.",
        neutral=("fp32",),
    ),
    OldKey(
        ("aio", "thread_count"),
        (("aio", "intra_op_parallelism"),),
        "Renamed in 0.16.4; Lightning sends it.",
        neutral=(1,),
    ),
    OldKey(
        ("gradient_accumulation_dtype",), (("data_types", "grad_accum_dtype"),), "Found in files of other programs."
    ),
    OldKey(("data_types", "grad_accum_type"), (("data_types", "grad_accum_dtype"),), "A misspelling in old files."),
    OldKey(
        ("elasticity", "prefer_large_batch"),
        (("elasticity", "prefer_larger_batch"),),
        "A misspelling in documents.",
        neutral=(True,),
    ),
    OldKey(
        ("optimizer", "params", "max_grad_norm"),
        (("gradient_clipping",),),
        "The engine clips gradients; 0 has no effect.",
        _max_grad_norm,
        "a number >= 0",
    ),
)


def _lookup(data: dict[str, Any], path: Path) -> dict[str, Any] | None:
    """Returns the object that holds the last part of ``path``, if it is there."""
    parent: Any = data
    for part in path[:-1]:
        parent = parent.get(part) if isinstance(parent, dict) else None
    return parent if isinstance(parent, dict) and path[-1] in parent else None


def _place(data: dict[str, Any], path: Path, value: Any) -> None:
    parent: Any = data
    for part in path[:-1]:
        parent = parent.setdefault(part, {})
    parent[path[-1]] = value


def _stage_as_bool(data: dict[str, Any], findings: ConfigMessages) -> None:
    """Translates ``zero_optimization: true``, with the bucket size that went with it at the top level."""
    value = data.get(_ZERO)
    bucket = data.pop("allgather_size", None)
    bool_form = isinstance(value, bool) or (isinstance(value, str) and value.strip().lower() in ("true", "false"))
    if bool_form:
        stage = 1 if to_bool(value) else 0
        data[_ZERO] = {"stage": stage}
        if stage:
            findings.notice(f'{findings.label((_ZERO,))}: true is an old form; write {{"stage": 1}}')
        findings.spelled[(_ZERO, "stage")] = (_ZERO,)
    if bucket is None or bucket == "auto":
        return
    old: Path = ("allgather_size",)
    if bool_form and data[_ZERO]["stage"]:
        data[_ZERO]["allgather_bucket_size"] = bucket
        findings.spelled[(_ZERO, "allgather_bucket_size")] = old
        findings.notice(f"{findings.label(old)} is now {_ZERO}.allgather_bucket_size")
        return
    findings.notice(
        f"{findings.label(old)} has no effect: it belonged to the old form zero_optimization: true; "
        f"use {_ZERO}.allgather_bucket_size"
    )
    _check_ignored_size(bucket, old, findings)


def _clipping_as_bool(data: dict[str, Any], findings: ConfigMessages) -> None:
    """Translates ``gradient_clipping: true``, which the original package takes as the number 1, and false as 0."""
    value = data.get(_CLIPPING)
    if isinstance(value, bool):
        data[_CLIPPING] = float(value)
        if value:
            findings.notice(f"{findings.label((_CLIPPING,))}: expected the largest norm, found true; it means 1.0")


def _check_ignored_size(value: Any, path: Path, findings: ConfigMessages) -> None:
    from deepspeed.config.types import to_int

    try:
        good = to_int(value) > 0
    except ValueError:
        good = False
    if not good:
        findings.fail(path, f"expected an integer > 0, found {shown(value)}")


def translate_old_keys(data: dict[str, Any], findings: ConfigMessages) -> None:
    """Moves every old spelling in ``data`` to its new place, in place.

    Each is reported by one notice unless it means the same as the default; an old key together with its new one is a
    problem.
    """
    _stage_as_bool(data, findings)
    _clipping_as_bool(data, findings)
    for entry in OLD_KEYS:
        parent = _lookup(data, entry.old)
        if parent is None:
            continue
        value = parent.pop(str(entry.old[-1]))
        if isinstance(value, str) and value.strip().lower() == "auto":
            continue
        if value is None and entry.same_section:
            continue
        converted = value
        if entry.convert is not None:
            try:
                converted = entry.convert(value)
            except ValueError:
                findings.fail(entry.old, f"expected {entry.expects}, found {shown(value)}")
                continue
        present = next((path for path in entry.new if _lookup(data, path) is not None), None)
        if present is not None:
            _report_both(data, entry, present, value, converted, findings)
            continue
        if converted is None and value is not None:
            continue
        for path in entry.new:
            _place(data, path, converted)
            findings.spelled[path] = entry.old
        if converted not in entry.neutral and not _is_default(entry, converted):
            is_same = entry.same_section or shown(value) == shown(converted)
            shown_value = "" if is_same else f"; {shown(value)} became {shown(converted)}"
            names = " and ".join(dotted(path) for path in entry.new)
            findings.notice(f"{findings.label(entry.old)} is an old name of {names}{shown_value}")


@cache
def old_names(place: Path) -> frozenset[str]:
    """Returns the old spellings of keys of the section at ``place``."""
    return frozenset(str(entry.old[-1]) for entry in OLD_KEYS if entry.old[:-1] == place)


def with_present_names(data: dict[str, Any], place: Path) -> dict[str, Any]:
    """Returns a section as a program wrote it, old spellings translated; each is logged once.

    Raises:
        ValueError: An old spelling has a value that it cannot have, or its present name is there with another one.
    """
    findings = ConfigMessages({}, {}, None)
    whole: dict[str, Any] = {}
    _place(whole, place, dict(data))
    translate_old_keys(whole, findings)
    if findings.problems():
        raise ValueError("; ".join(findings.problems()))
    for notice in findings.notices:
        warn_once(notice, notice)
    parent = _lookup(whole, place)
    assert parent is not None
    section: dict[str, Any] = parent[str(place[-1])]
    return section


def _is_default(entry: OldKey, value: Any) -> bool:
    """Returns whether an old section is there but switched off."""
    return entry.same_section and isinstance(value, dict) and value in ({}, {"enabled": False})


def _report_both(
    data: dict[str, Any], entry: OldKey, present: Path, value: Any, converted: Any, findings: ConfigMessages
) -> None:
    parent = _lookup(data, present)
    assert parent is not None
    if converted == parent[str(present[-1])]:
        findings.notice(f"{findings.label(entry.old)} repeats {dotted(present)} under its old name; leave it out")
        return
    findings.problem(
        entry.old,
        f"{shown(value)} is given together with {dotted(present)}, its present name, which is "
        f"{shown(parent[str(present[-1])])}; keep only {dotted(present)}",
    )
