""":func:`parse`: from any source to a validated configuration, with all problems in one error."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from deepspeed.axes import TENSOR
from deepspeed.config.batch import (
    ACCUMULATION,
    MICRO,
    TOTAL,
    BatchSizes,
    batch_mismatch,
    resolve_batch,
    resolve_uneven,
    uneven_mismatch,
)
from deepspeed.config.degrees import degrees
from deepspeed.config.deprecated import translate_old_keys
from deepspeed.config.describe import default_of
from deepspeed.config.effects import note_effects
from deepspeed.config.elastic_rules import fit_shard_ranks, is_elastic, put_elastic_batch
from deepspeed.config.messages import ConfigMessages, Path, shown
from deepspeed.config.reader import BATCH_KEYS, build, clean, is_auto, structural_copy
from deepspeed.config.rules import check_ranks, check_rules
from deepspeed.config.section import Section
from deepspeed.config.sections import optimizer as optimizers
from deepspeed.config.sections import scheduler as schedulers
from deepspeed.config.sections.root import Root
from deepspeed.config.source import read_source
from deepspeed.config.suggest import declared_paths, nearest
from deepspeed.config.types import to_bool
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.missing_features import FEATURES

# The keys that zero.Init needs; the rest of its dict may be incomplete.
ZERO_INIT_KEYS = frozenset({"zero_optimization", "fp16", "bf16", "bfloat16", "torch_autocast", "data_types"})
PURPOSES = {"zero_init": ZERO_INIT_KEYS, "compression": frozenset({"compression_training"})}


@dataclass(frozen=True)
class ParsedConfig:
    """A valid configuration."""

    root: Root  # all keys, by their names; sections that were not given have their defaults
    raw: dict[str, Any]  # the caller's dict, untouched (for a file, what was read from it)
    # one line each, for the log: what ``"auto"`` became, old names, values without effect, and unknown keys where these
    # are only warned of
    notices: list[str]
    batch: BatchSizes | None  # the three batch sizes; None where the number of data-parallel ranks was not given
    warnings: list[str] = field(default_factory=list)  # those of ``notices`` that belong in the log as warnings


def parse(
    source: Any,
    *,
    dp_world_size: int | Callable[[Root], int] | None = None,
    purpose: Literal["train", "zero_init", "compression"] = "train",
) -> ParsedConfig:
    """Reads and checks a configuration.

    Logs nothing: the caller logs ``notices``. Needs no other rank.

    Args:
        source: A dict, a path to an Hjson file, or URL-safe base64 of JSON.
        dp_world_size: Data-parallel ranks, for the batch arithmetic; or a function of the keys that returns them (as
            :func:`~deepspeed.config.degrees.data_parallel_size`), whose DeepSpeedConfigError is one of the problems.
        purpose: ``zero_init`` reads only ZeRO, offload, precision and data types; ``compression`` only
            ``compression_training``.

    Raises:
        DeepSpeedConfigError: With every problem of the configuration.
    """
    document = read_source(source)
    findings = ConfigMessages(document.lines, _order(document.data), document.name)
    for sentence in document.problems:
        findings.add((), sentence)
    for line in document.notices:
        findings.notice(line)
    data = structural_copy(document.data)
    if purpose in PURPOSES:
        data = {name: value for name, value in data.items() if name in PURPOSES[purpose]}
    else:
        _set_dotted_aside(data, findings)
        _set_misplaced_aside(data, findings)
    translate_old_keys(data, findings)
    cleaned = clean(Root, data, (), findings)
    if isinstance(cleaned.get("optimizer"), dict):
        read_optimizer(cleaned["optimizer"], findings)
    if isinstance(cleaned.get("scheduler"), dict):
        read_scheduler(cleaned["scheduler"], findings)
    root = build(Root, cleaned, (), findings)
    assert root is not None, "no key of the top level is required"
    root = _without_idle_offload(root, findings)
    check_rules(root, findings)
    ranks = _data_ranks(dp_world_size, root, findings)
    if ranks is not None:
        root = fit_shard_ranks(root, ranks, findings)
        check_ranks(root, ranks, findings)
    refuse_unavailable(root, findings)
    if purpose == "train":
        root = _by_data_ranks(root, ranks, findings)
        root = put_elastic_batch(root, data, ranks, findings)
        declared = root.data_parallel_size
        if declared is not None and ranks is not None and declared != ranks:
            findings.problem(
                ("data_parallel_size",), f"{declared} is stated, but there are {ranks} data-parallel ranks"
            )
        if not is_elastic(root):
            _check_batch(root, data, ranks, findings)
    findings.raise_if_any()
    note_effects(root, findings)
    batch = None
    if purpose == "train" and ranks is not None:
        batch = _resolve(root, ranks)
    if purpose == "train":
        _note_auto_batch(data, batch, findings)
    return ParsedConfig(root, document.data, findings.notices, batch, findings.warnings)


def _data_ranks(given: int | Callable[[Root], int] | None, root: Root, findings: ConfigMessages) -> int | None:
    if not callable(given):
        return given
    try:
        return given(root)
    except DeepSpeedConfigError as error:
        findings.add((), str(error))
        return None


def _order(data: Any, path: Path = (), order: dict[Path, int] | None = None) -> dict[Path, int]:
    """Returns the place of every key in the configuration, so that problems come in that order."""
    order = {} if order is None else order
    if isinstance(data, Mapping):
        for name, value in data.items():
            order[(*path, str(name))] = len(order)
            _order(value, (*path, str(name)), order)
    elif isinstance(data, (list, tuple)):
        for index, value in enumerate(data):
            _order(value, (*path, index), order)
    return order


def _set_dotted_aside(data: dict[str, Any], findings: ConfigMessages) -> None:
    """Removes dotted top-level keys that spell a known path: files have them, but they never had an effect."""
    for name in [name for name in data if isinstance(name, str) and "." in name]:
        if name in declared_paths():
            del data[name]
            findings.notice(f'{findings.label((name,))} has no effect: "{name}" must be written as nested objects')


def _without_idle_offload(root: Root, findings: ConfigMessages) -> Root:
    """Returns the configuration without ``offload_param`` below stage 3, where each rank has whole parameters."""
    zero = root.zero_optimization
    at: Path = ("zero_optimization", "offload_param")
    if zero.stage == 3 or zero.offload_param is None or ("zero_optimization", "stage") in findings.failed:
        return root
    if zero.offload_param.device != "none":
        findings.notice(
            f"{findings.label(at)} has no effect: shards of parameters exist at stage 3 only, and "
            f"zero_optimization.stage is {zero.stage}; the parameters stay on the device"
        )
        zero = zero.model_copy(update={"offload_param": None})
    return root.model_copy(update={"zero_optimization": zero})


def _set_misplaced_aside(data: dict[str, Any], findings: ConfigMessages) -> None:
    """Removes arguments of the optimizer that are beside ``params`` and have the value that holds anyway.

    The original package ignores what is there. Other values are left, and refused like unknown keys.
    """
    section = data.get("optimizer")
    if not isinstance(section, dict) or not isinstance(section.get("type"), str):
        return
    by_lowered = {name.lower(): model for name, model in optimizers.OWN_OPTIMIZERS.items()}
    model = by_lowered.get(section["type"].strip().lower())
    params = section.get("params")
    for name in set() if model is None else set(section) & set(model.model_fields):
        assert model is not None
        holds = params[name] if isinstance(params, dict) and name in params else default_of(model.model_fields[name])
        if section[name] == holds:
            del section[name]
            findings.notice(
                f"{findings.label(('optimizer', name))} has no effect beside optimizer.params, and is the value in use "
                "anyway. Move it into optimizer.params, or leave it out"
            )


def _by_data_ranks(root: Root, ranks: int | None, findings: ConfigMessages) -> Root:
    """Returns the configuration with a batch that counts ranks which share layers once.

    The original package multiplies by all ranks, and so do Accelerate and the Trainer of Transformers when they fill
    in the product. If all three sizes are given and differ by exactly this factor, the intention is clear.
    """
    total, micro, steps = root.train_batch_size, root.train_micro_batch_size_per_gpu, root.gradient_accumulation_steps
    shared = degrees(root)[TENSOR]
    if ranks is None or shared == 1 or total is None or micro is None or steps is None:
        return root
    if total != micro * steps * ranks * shared:
        return root
    found = micro * steps * ranks
    findings.notice(
        f"{findings.label((TOTAL,))}: {total} counts each of the {ranks * shared} ranks, but with "
        f"tensor_parallel.autotp_size {shared} only {ranks} see other samples; an update has {found} samples: "
        f"{MICRO} {micro} x {ACCUMULATION} {steps} x {ranks}"
    )
    return root.model_copy(update={TOTAL: found})


def _resolve(root: Root, ranks: int) -> BatchSizes:
    total, micro = root.train_batch_size, root.train_micro_batch_size_per_gpu
    if root.elasticity is not None and root.elasticity.continues:
        assert total is not None and micro is not None
        return resolve_uneven(total, micro, ranks)
    return resolve_batch(total, micro, root.gradient_accumulation_steps, ranks)


def _check_batch(root: Root, data: dict[str, Any], dp_world_size: int | None, findings: ConfigMessages) -> None:
    sizes = (root.train_batch_size, root.train_micro_batch_size_per_gpu, root.gradient_accumulation_steps)
    paths: tuple[Path, ...] = ((TOTAL,), (MICRO,), (ACCUMULATION,))
    if any(path in findings.failed for path in paths):
        return
    if root.elasticity is not None and root.elasticity.continues:
        if (uneven := uneven_mismatch(*sizes)) is not None:
            findings.problem((TOTAL,), uneven)
        return
    wrong = batch_mismatch(*sizes, dp_world_size)
    if wrong is None:
        return
    left = [name for name in BATCH_KEYS if is_auto(data.get(name))]
    if sizes[0] is None and sizes[1] is None and left:
        for name in left:
            if name != ACCUMULATION:
                findings.problem(
                    (name,),
                    '"auto" is left in it and nothing else determines it; give a number here or in '
                    f"{MICRO if name == TOTAL else TOTAL}",
                )
        if left != [ACCUMULATION]:
            return
    advice = ""
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true" and batch_mismatch(*sizes, 1) is None:
        advice = (
            ". Accelerate has counted one process, as it does on machines without a GPU: put examples/on_cpu.py of the "
            "repository before the script (accelerate launch ... on_cpu.py train.py)"
        )
    findings.problem((TOTAL,), f"{wrong}. {_origins(data, dp_world_size, findings)}{advice}")


def _origins(data: dict[str, Any], dp_world_size: int | None, findings: ConfigMessages) -> str:
    """Returns the source of each number in the batch rule, in words."""
    parts = []
    for name in BATCH_KEYS:
        if data.get(name) is None:
            parts.append(f"{name} is not given")
        elif is_auto(data[name]):
            parts.append(f'{name} is "auto"')
        else:
            parts.append(f"{findings.label((name,))} is given as {data[name]}")
    if dp_world_size is not None:
        parts.append(f"the data-parallel size is the number of ranks that share the batch: {dp_world_size}")
    return f"Where the numbers come from: {'; '.join(parts)}"


def _note_auto_batch(data: dict[str, Any], batch: BatchSizes | None, findings: ConfigMessages) -> None:
    sizes = (
        (None, None, None)
        if batch is None
        else (batch.train_batch_size, batch.micro_batch_size, batch.accumulation_steps)
    )
    for name, size in zip(BATCH_KEYS, sizes, strict=True):
        if is_auto(data.get(name)):
            became = f"{size}" if size is not None else "what the number of ranks will give"
            findings.notice(f'{findings.label((name,))}: "auto" became {became}')


def value_at(root: Root, path: Path) -> Any:
    """Returns the value of a key; None when a section on the way is absent."""
    value: Any = root
    for part in path:
        if value is None:
            return None
        value = getattr(value, str(part))
    return value


def refuse_unavailable(root: Root, findings: ConfigMessages) -> None:
    """Reports every key that switches a missing feature on."""
    for feature in FEATURES:
        for key in feature.keys:
            value = value_at(root, key.path)
            if value is None or not key.switched_on(value):
                continue
            is_section = hasattr(value, "model_fields_set")
            findings.problem(key.path, feature.refusal(key, "" if is_section else shown(value)))


def _params_object(section: dict[str, Any], path: Path, findings: ConfigMessages) -> dict[str, Any] | None:
    params = section.get("params")
    if params is None:
        section.pop("params", None)
        return {}
    if isinstance(params, dict):
        return params
    findings.fail(path, f"expected an object, found {shown(params)}")
    del section["params"]
    return None


def _read(model: type[Section], params: dict[str, Any], path: Path, findings: ConfigMessages) -> dict[str, Any]:
    """Returns the given parameters, coerced; defaults stay out, they are the class's own business."""
    built = build(model, clean(model, params, path, findings), path, findings)
    return (
        {}
        if built is None
        else {name: getattr(built, name) for name in model.model_fields if name in built.model_fields_set}
    )


def _type_text(section: dict[str, Any], path: Path, findings: ConfigMessages) -> str | None:
    name = section.get("type")
    if name is None or isinstance(name, str):
        return name
    findings.fail(path, f"expected the name of a class as text, found {shown(name)}")
    del section["type"]
    return None


def _unknown(name: str, path: Path, known: list[str], kind: str, findings: ConfigMessages) -> None:
    findings.fail(
        path, f'{shown(name)} is no known {kind}; did you mean "{nearest(name, known)}"? Known are {", ".join(known)}'
    )


def read_optimizer(section: dict[str, Any], findings: ConfigMessages) -> None:
    """Checks ``optimizer`` in place: the name in its proper spelling, the parameters coerced."""
    at: Path = ("optimizer", "type")
    params = _params_object(section, ("optimizer", "params"), findings)
    name = _type_text(section, at, findings)
    if name is None or params is None:
        if name is None and params and ("optimizer", "type") not in findings.failed:
            findings.problem(("optimizer", "params"), "parameters are given without optimizer.type; name the optimizer")
        return
    table = {each.lower(): each for each in (*optimizers.OWN_OPTIMIZERS, *optimizers.MISSING_OPTIMIZERS)}
    name = table.get(name.strip().lower(), name.strip())
    if "." in name:  # a class of the program, which gives initialize an instance of it
        return
    if name in optimizers.MISSING_OPTIMIZERS:
        findings.fail(at, f"{name} is not available: {optimizers.MISSING_OPTIMIZERS[name]}")
        return
    if name in optimizers.NOT_ELEMENTWISE:
        findings.fail(
            at,
            f"{name} of torch.optim cannot work on shards: {optimizers.NOT_ELEMENTWISE[name]}; use an elementwise one",
        )
        return
    known = [*optimizers.OWN_OPTIMIZERS, *optimizers.TORCH_OPTIMIZERS]
    if name not in known:
        _unknown(name, at, known, "optimizer", findings)
        return
    section["type"] = name
    model = optimizers.parameter_model(name, _flag(params, "torch_adam", False), _flag(params, "adam_w_mode", True))
    section["params"] = _read(model, params, ("optimizer", "params"), findings)
    if is_auto(section["params"].get("lr")):
        findings.warning(
            f'{findings.label(("optimizer", "params", "lr"))}: "auto" is left in it. Give a number, unless initialize '
            "gets an optimizer"
        )
    if section["params"].get("amsgrad") and not issubclass(model, optimizers.TorchAdamParams):
        remedy = "; torch_adam: true chooses torch's class, which has it" if name.startswith("Adam") else ""
        findings.fail(("optimizer", "params", "amsgrad"), f"{name} has no AMSGrad variant{remedy}")


def _flag(params: dict[str, Any], name: str, default: bool) -> bool:
    """Returns a switch read ahead of validation; a value that is none counts as the default and is refused later."""
    try:
        return to_bool(params[name])
    except (KeyError, ValueError):
        return default


def read_scheduler(section: dict[str, Any], findings: ConfigMessages) -> None:
    """Checks ``scheduler`` in place: a known name, the parameters coerced."""
    at: Path = ("scheduler", "type")
    params = _params_object(section, ("scheduler", "params"), findings)
    name = _type_text(section, at, findings)
    if name is None or params is None:
        if name is None and params and at not in findings.failed:
            findings.problem(("scheduler", "params"), "parameters are given without scheduler.type; name the schedule")
        return
    if name in schedulers.UNUSABLE_SCHEDULERS:
        findings.fail(at, f"{name} cannot be built from a configuration: {schedulers.UNUSABLE_SCHEDULERS[name]}")
        return
    models = {**schedulers.OWN_SCHEDULERS, **schedulers.TORCH_SCHEDULERS}
    if name not in models:
        _unknown(name, at, list(models), "schedule", findings)
        return
    read = _read(models[name], params, ("scheduler", "params"), findings)
    section["params"] = read
    if read.get("warmup_num_steps") == 0:
        # accelerate and transformers pass 0 for no warm-up; the schedules need a positive number.
        read["warmup_num_steps"] = 1
        findings.notice(f"{findings.label(('scheduler', 'params', 'warmup_num_steps'))}: 0 means no rise and became 1")
    total, warmup = read.get("total_num_steps"), read.get("warmup_num_steps", 1000)
    if total is not None and "warmup_num_steps" in models[name].model_fields and total < warmup:
        findings.notice(
            f"{findings.label(('scheduler', 'params', 'total_num_steps'))}: {total} steps end before the rise of "
            f"{warmup} steps (warmup_num_steps)"
        )


def parse_section(source: Any, name: str) -> Section | None:
    """Reads and checks section ``name`` (None without it) of any source; the rest may be incomplete and is ignored.

    Raises:
        DeepSpeedConfigError: With every problem of the section.
    """
    if isinstance(source, ParsedConfig):
        section: Section | None = getattr(source.root, name)
        return section
    document = read_source(source)
    if name not in document.data:
        return None
    findings = ConfigMessages(document.lines, {}, document.name)
    given = structural_copy({name: document.data[name]})
    root = build(Root, clean(Root, given, (), findings), (), findings)
    findings.raise_if_any()
    return getattr(root, name)
