""":func:`student_initialization`: a model with fewer layers takes over some of those of a larger one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from deepspeed.compression.settings import section_of
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.logging import log_dist
from deepspeed.zero.access.gathered import GatheredParameters


def recursive_getattr(model: nn.Module, module_name: str) -> Any:
    """Returns the attribute of ``model`` with a dotted name, such as ``"layers.0.weight"``.

    Raises:
        AttributeError: There is none.
    """
    found: Any = model
    for part in module_name.split("."):
        found = getattr(found, part)
    return found


def recursive_setattr(model: nn.Module, module_name: str, module: Any) -> None:
    """Puts ``module`` (a module, parameter or value) where the dotted name says.

    Raises:
        AttributeError: What should hold it does not exist.
    """
    parent, _, name = module_name.rpartition(".")
    setattr(recursive_getattr(model, parent) if parent else model, name, module)


def convert_conv1d_to_linear(model: nn.Module, convert_type: type[nn.Module]) -> nn.Module:
    """Replaces transformers' ``Conv1D`` layers by ``nn.Linear`` with the transposed weight, in place.

    Compression knows ``Conv1D`` itself; this is for programs that want linear layers.

    Args:
        model: The model, or one with an attribute ``module``.
        convert_type: The class ``Conv1D``.

    Returns:
        ``model``.
    """
    inner = model.module if isinstance(getattr(model, "module", None), nn.Module) else model
    assert isinstance(inner, nn.Module)
    for name, module in list(inner.named_modules()):
        if name and type(module) is convert_type:
            old: Any = module
            with torch.device("meta"):
                rows, columns = old.weight.shape
                linear = nn.Linear(rows, columns, old.bias is not None)
            linear.weight = nn.Parameter(old.weight.detach().t().contiguous(), old.weight.requires_grad)
            linear.bias = old.bias
            inner.set_submodule(name, linear.train(old.training))
    return model


def student_initialization(student_model: nn.Module, teacher_model: nn.Module, deepspeed_config: Any) -> nn.Module:
    """Copies layers of a teacher into a student, as ``compression_training.layer_reduction`` says.

    Layer ``i`` of the student below ``module_name_prefix`` takes the values of the teacher's layer
    ``teacher_layer[i]``; then each of ``other_module_name`` takes those of its namesake. On every rank alike.

    Args:
        student_model: With as many layers as ``teacher_layer`` has entries; built by the caller.
        teacher_model: Stays as it is.
        deepspeed_config: A dict or a path.

    Returns:
        ``student_model``.

    Raises:
        DeepSpeedConfigError: Names, numbers or shapes do not fit; nothing was copied.
    """
    layers = section_of(deepspeed_config).layer_reduction
    where = "compression_training.layer_reduction"
    if layers is None or layers.module_name_prefix is None or layers.teacher_layer is None:
        raise DeepSpeedConfigError(f"{where}: module_name_prefix and teacher_layer are required")
    prefix, chosen = layers.module_name_prefix, layers.teacher_layer
    pairs = []
    students = _children(student_model, prefix, f"{where}.module_name_prefix", "student")
    teachers = _children(teacher_model, prefix, f"{where}.module_name_prefix", "teacher")
    if len(students) != len(chosen):
        raise DeepSpeedConfigError(
            f"{where}.teacher_layer: {len(chosen)} layers are named, but the student has {len(students)} in {prefix}; "
            "build it with as many"
        )
    for number, index in enumerate(chosen):
        if index >= len(teachers):
            raise DeepSpeedConfigError(
                f"{where}.teacher_layer: there is no layer {index}; the teacher has {len(teachers)} in {prefix}"
            )
        pairs += _pairs(students[number], teachers[index], f"{prefix}.{number}")
    for name in layers.other_module_name or []:
        found = [
            _named(model, name, f"{where}.other_module_name", kind)
            for model, kind in ((student_model, "student"), (teacher_model, "teacher"))
        ]
        pairs += _pairs(found[0], found[1], name)
    for target, source in pairs:
        with torch.no_grad(), GatheredParameters([target], modifier_rank=0), GatheredParameters([source]):
            target.copy_(source)
    log_dist(
        f"compression: {len(students)} layers of {prefix} taken from the teacher's {', '.join(map(str, chosen))}, "
        f"{len(pairs)} tensors in all"
    )
    return student_model


def _named(model: nn.Module, name: str, where: str, kind: str) -> Any:
    try:
        return recursive_getattr(model, name)
    except AttributeError as error:
        raise DeepSpeedConfigError(f"{where}: the {kind} has no {name!r} ({error})") from error


def _children(model: nn.Module, name: str, where: str, kind: str) -> list[nn.Module]:
    found = _named(model, name, where, kind)
    if not isinstance(found, (nn.ModuleList, nn.Sequential)):
        raise DeepSpeedConfigError(
            f"{where}: {name!r} of the {kind} is a {type(found).__name__}; expected a ModuleList or Sequential"
        )
    return list(found)


def _pairs(target: Any, source: Any, name: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Tensors of two modules (or two tensors), in order."""
    if isinstance(target, torch.Tensor):
        targets, sources = [target], [source]
    else:
        targets = [*target.parameters(), *target.buffers()]
        sources = [*source.parameters(), *source.buffers()]
    mine, theirs = ([tuple(getattr(t, "ds_shape", t.shape)) for t in side] for side in (targets, sources))
    if mine != theirs:
        raise DeepSpeedConfigError(
            f"compression_training.layer_reduction: {name} of student and teacher have different shapes: {mine} and "
            f"{theirs}; layers are copied as they are"
        )
    return list(zip(targets, sources, strict=True))
