"""Names and parameters of ``optimizer`` and ``scheduler``."""

from __future__ import annotations

from typing import Any

from deepspeed.config.messages import ConfigMessages, Path, shown
from deepspeed.config.reader import build, clean
from deepspeed.config.section import Section
from deepspeed.config.sections import optimizer as optimizers
from deepspeed.config.sections import scheduler as schedulers
from deepspeed.config.suggest import nearest
from deepspeed.config.types import to_bool


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
    """The given parameters, coerced; defaults stay out, they are the class's own business."""
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
    if section["params"].get("amsgrad") and not issubclass(model, optimizers.TorchAdamParams):
        remedy = "; torch_adam: true chooses torch's class, which has it" if name.startswith("Adam") else ""
        findings.fail(("optimizer", "params", "amsgrad"), f"{name} has no AMSGrad variant{remedy}")


def _flag(params: dict[str, Any], name: str, default: bool) -> bool:
    """A switch read ahead of validation; a value that is none counts as the default and is refused later."""
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
        # accelerate and transformers send 0 for no warm-up; the schedules themselves want a positive number.
        read["warmup_num_steps"] = 1
        findings.notice(f"{findings.label(('scheduler', 'params', 'warmup_num_steps'))}: 0 means no rise and became 1")
    total, warmup = read.get("total_num_steps"), read.get("warmup_num_steps", 1000)
    if total is not None and "warmup_num_steps" in models[name].model_fields and total < warmup:
        findings.notice(
            f"{findings.label(('scheduler', 'params', 'total_num_steps'))}: {total} steps end before the rise of "
            f"{warmup} steps (warmup_num_steps)"
        )
