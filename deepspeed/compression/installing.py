""":func:`init_compression`: prepares the layers that a configuration selects for compression."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import nn

from deepspeed.compression import rounding
from deepspeed.compression.basic_layer import (
    INPUT,
    BNLayer_Compress,
    Conv1DLayer_Compress,
    Conv2dLayer_Compress,
    Embedding_Compress,
    LinearLayer_Compress,
    QuantAct,
)
from deepspeed.compression.report import announce
from deepspeed.compression.settings import PRUNED, Selection, kind_of, section_of, select
from deepspeed.compression.sizes import LayerWeights, shape_of
from deepspeed.compression.snip import SCORES as SNIP_SCORES
from deepspeed.compression.snip import SnipPlan, SnipScores
from deepspeed.compression.techniques import Kind, Pruning, Techniques, WeightRounding
from deepspeed.compression.widths import WidthSchedule
from deepspeed.config.sections.compression import CompressionTraining
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.logging import log_dist
from deepspeed.parallel.pipe.module import PipelineModule
from deepspeed.zero.access.gathered import GatheredParameters

_CLASSES: dict[str, type[nn.Module]] = {
    "linear": LinearLayer_Compress,
    "conv1d": Conv1DLayer_Compress,
    "conv2d": Conv2dLayer_Compress,
    "embedding": Embedding_Compress,
}


def init_compression(model: nn.Module, deepspeed_config: Any, teacher_model: Any = None, mpu: Any = None) -> nn.Module:
    """Applies the techniques of ``compression_training`` to the layers of ``model``.

    Call it before the optimizer is made, with the same arguments on every rank; every rank must call it if parameters
    are sharded. Layers keep their names and parameters. ``topk`` adds score parameters, which must be trained with the
    rest. With ``layer_reduction``, layers of ``teacher_model`` are first copied into the model.

    Args:
        deepspeed_config: A dict, a path, or what ``deepspeed.config.parse`` returned. Only ``compression_training`` is
            read.

    Raises:
        DeepSpeedConfigError: The section does not fit the model; nothing was changed.
    """
    if mpu is not None:
        raise DeepSpeedConfigError(
            "init_compression(mpu=...): tensor-parallel layers cannot be compressed; leave mpu out and compress the "
            "whole model under ZeRO, at any stage"
        )
    compress(model, section_of(deepspeed_config), teacher_model)
    return model


def compress(model: nn.Module, section: CompressionTraining, teacher: Any = None) -> None:
    """Applies the techniques of a validated section to the layers of ``model``, see :func:`init_compression`.

    Raises:
        DeepSpeedConfigError: The model is compressed already or is a PipelineModule, the section does not fit it, or
            ``layer_reduction`` has no teacher.
    """
    if any(techniques_on(module) is not None for module in model.modules()):
        raise DeepSpeedConfigError("init_compression: the model is compressed already; call it once, on a plain model")
    if isinstance(model, PipelineModule):
        raise DeepSpeedConfigError(
            "init_compression: layers of a PipelineModule are spread over ranks; compress a model without a pipeline"
        )
    selections = select(model, section)
    LayerWeights(model).check(selections)
    if section.layer_reduction is not None and section.layer_reduction.enabled:
        if teacher is None:
            raise DeepSpeedConfigError(
                "compression_training.layer_reduction: init_compression(teacher_model=...) is missing; pass the "
                "model from which layers are copied"
            )
        student_initialization(model, teacher, {"compression_training": section.model_dump(exclude_unset=True)})
    users = LayerWeights(model)
    for selection in selections:
        for name in selection.names:
            if selection.technique == "activation_quantization":
                _round_input(users.modules[name], name, selection)
            elif selection.technique == "weight_quantization":
                rounding = _rounding(selection, users.by_rows(name))
                for user in users.of(name):
                    _techniques(users.modules[user], user).rounding = rounding
            else:
                _prune(users, name, selection)
        _follow(model, selection)
    model.__dict__["compression_section"] = section
    announce(selections)


def techniques_on(module: nn.Module) -> Techniques | None:
    """Returns the techniques of a layer; None if it is not compressed."""
    found = module.__dict__.get("compression")
    return found if isinstance(found, Techniques) else None


def _techniques(module: nn.Module, name: str) -> Techniques:
    """Returns the layer's techniques; changes the class of a layer that is not compressed yet."""
    found = techniques_on(module)
    if found is None:
        kind = kind_of(module)
        assert kind is not None
        found = Techniques(name, is_transposed=kind == "conv1d", original_class=type(module))
        module.__class__ = _CLASSES[kind]
        module.__dict__["compression"] = found
    return found


def _rounding(selection: Selection, by_rows: bool) -> WeightRounding:
    shared, params = selection.shared, selection.params
    in_forward = shared.quantize_weight_in_forward
    mixed = shared.fp16_mixed_quantize
    schedule = WidthSchedule(
        offset=shared.schedule_offset,
        start=params.target_bits if in_forward else params.start_bits,
        target=params.target_bits,
        period=params.quantization_period,
        mixing=mixed.quantize_change_ratio if mixed.enabled and not in_forward else None,
    )
    return WeightRounding(
        schedule=schedule,
        groups=None if by_rows else shared.quantize_groups,
        symmetric=shared.quantization_type == "symmetric",
        stochastic=shared.rounding == "stochastic",
    )


def _round_input(module: nn.Module, name: str, selection: Selection) -> None:
    shared = selection.shared
    by_image = kind_of(module) == "conv2d" or isinstance(module, Conv2dLayer_Compress)
    _techniques(module, name).activation_offset = shared.schedule_offset
    quantizer = QuantAct(
        selection.params.bits,
        symmetric=shared.quantization_type == "symmetric",
        static=shared.range_calibration == "static",
        by_image=by_image,
    )
    weight: Any = module.weight
    module.add_module(INPUT, quantizer.to(weight.device).train(module.training))


def _prune(users: LayerWeights, name: str, selection: Selection) -> None:
    kind, shared = PRUNED[selection.technique], selection.shared
    heads = getattr(shared, "num_heads", None)
    plan = SnipPlan.of(shared) if selection.is_snip else None
    share = selection.params.dense_ratio if plan is None else plan.share
    pruning = Pruning(kind, shared.method, share, shared.schedule_offset, heads, plan)
    modules: list[Any] = [users.modules[user] for user in users.of(name)]
    techniques = [
        _techniques(module, user) for module, user in zip(modules, users.of(name), strict=True)
    ]  # of all users, before any of them gets a mask
    first = modules[0]
    if pruning.method == "l1":
        with torch.no_grad(), GatheredParameters([first.weight]):
            weight = first.weight.t() if techniques[0].is_transposed else first.weight
            mask = rounding.largest(rounding.norms(weight, kind, heads), pruning.share)
        for module in modules:
            module.register_buffer(pruning.buffer, mask)
    elif plan is not None:
        if SNIP_SCORES in first._modules:
            return  # added with a tied layer of the group
        _prepare_scores(modules, techniques[0].is_transposed, plan, pruning.buffer)
    else:
        scores = nn.Parameter(_scores(first, kind, heads))
        for module in modules:
            module.register_parameter(pruning.scores, scores)
    for technique in techniques:
        technique.prunings[kind] = pruning


def _prepare_scores(modules: list[Any], is_transposed: bool, plan: SnipPlan, buffer: str) -> None:
    """Adds the scores of blocks, and a mask that keeps every weight until the first pruning."""
    rows, columns = shape_of(modules[0])
    device = modules[0].weight.device
    scores = SnipScores(rows // plan.block[0], columns // plan.block[1], device)
    shape = tuple(getattr(modules[0].weight, "ds_shape", modules[0].weight.shape))
    for module in modules:
        module.add_module(SNIP_SCORES, scores)
        module.register_buffer(
            buffer, torch.ones(shape[::-1] if is_transposed else shape, dtype=torch.bool, device=device)
        )


def _scores(module: Any, kind: Kind, heads: int | None) -> torch.Tensor:
    rows, columns = shape_of(module)
    if kind == "sparse":
        shape: tuple[int, ...] = (rows, columns)
    else:
        shape = (1, rows if heads is None else heads)
    weight = module.weight
    scores = torch.empty(shape, device=weight.device, dtype=weight.dtype)
    nn.init.kaiming_uniform_(scores, a=math.sqrt(5))
    if kind == "sparse" and isinstance(module, nn.Conv2d):
        scores = scores.view(weight.shape)
    return scores


def _follow(model: nn.Module, selection: Selection) -> None:
    """Records related layers, and masks batch norms after pruned channels so that removing them changes nothing."""
    kind = PRUNED.get(selection.technique)
    if kind is None:
        return
    for match in selection.matches:
        for related in match.related:
            for name, other in zip(match.names, related, strict=True):
                module = model.get_submodule(other)
                techniques = techniques_on(model.get_submodule(name))
                assert techniques is not None
                techniques.related.setdefault(kind, []).append(other)
                if kind_of(module) == "batchnorm2d":
                    module.__class__ = BNLayer_Compress
                    module.__dict__["followed"] = [model.get_submodule(name)]
    if kind != "sparse":
        alone = [name for match in selection.matches if not match.related for name in match.names]
        if alone:
            log_dist(
                f"{selection.key('related_modules')}: none given, so the pruned weights of {len(alone)} layers "
                "become zero and are not removed; name the layers before or after them so that "
                "redundancy_clean removes them"
            )


def recursive_getattr(model: nn.Module, module_name: str) -> Any:
    """Returns the attribute of ``model`` with a dotted name, such as ``"layers.0.weight"``.

    Raises:
        AttributeError: There is no such attribute.
    """
    return functools.reduce(getattr, module_name.split("."), model)


def recursive_setattr(model: nn.Module, module_name: str, module: Any) -> None:
    """Sets the attribute of ``model`` with a dotted name to ``module`` (a module, parameter or value).

    Raises:
        AttributeError: The parent in the dotted name does not exist.
    """
    parent, _, name = module_name.rpartition(".")
    setattr(recursive_getattr(model, parent) if parent else model, name, module)


def convert_conv1d_to_linear(model: nn.Module, convert_type: type[nn.Module]) -> nn.Module:
    """Replaces transformers' ``Conv1D`` by ``nn.Linear`` with the transposed weight, in place; returns the model."""
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
    """Copies layers of a teacher into a student, by ``compression_training.layer_reduction``; returns the student.

    Layer ``i`` of the student below ``module_name_prefix`` gets the values of the teacher's layer
    ``teacher_layer[i]``. Each module of ``other_module_name`` gets those of the teacher's module of the same name. Call
    it with the same arguments on every rank; every rank must call it if parameters are sharded.

    Raises:
        DeepSpeedConfigError: Names, numbers of layers or shapes do not fit; nothing was copied.
    """
    layers = section_of(deepspeed_config).layer_reduction
    where = "compression_training.layer_reduction"
    if layers is None or layers.module_name_prefix is None or layers.teacher_layer is None:
        raise DeepSpeedConfigError(f"{where}: module_name_prefix and teacher_layer are required; set both")
    prefix, chosen = layers.module_name_prefix, layers.teacher_layer
    pairs = []
    students = _children(student_model, prefix, f"{where}.module_name_prefix", "student")
    teachers = _children(teacher_model, prefix, f"{where}.module_name_prefix", "teacher")
    if len(students) != len(chosen):
        raise DeepSpeedConfigError(
            f"{where}.teacher_layer: expected one entry for each of the student's {len(students)} layers in {prefix}, "
            f"found {len(chosen)}; build the student with as many layers as entries"
        )
    for number, index in enumerate(chosen):
        if index >= len(teachers):
            raise DeepSpeedConfigError(
                f"{where}.teacher_layer: there is no layer {index}; choose among the {len(teachers)} in {prefix}, from "
                "0"
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
        f"compression: copied the teacher's layers {', '.join(map(str, chosen))} of {prefix} into the student, "
        f"{len(pairs)} tensors in all"
    )
    return student_model


def _named(model: nn.Module, name: str, where: str, kind: str) -> Any:
    try:
        return recursive_getattr(model, name)
    except AttributeError as error:
        raise DeepSpeedConfigError(f"{where}: the {kind} has no {name!r} ({error}); correct the name") from error


def _children(model: nn.Module, name: str, where: str, kind: str) -> list[nn.Module]:
    found = _named(model, name, where, kind)
    if not isinstance(found, (nn.ModuleList, nn.Sequential)):
        raise DeepSpeedConfigError(
            f"{where}: {name!r} of the {kind} is a {type(found).__name__}; expected a ModuleList or Sequential"
        )
    return list(found)


def _pairs(target: Any, source: Any, name: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns pairs of target and source tensor of two modules (or of two tensors), in order."""
    if isinstance(target, torch.Tensor):
        targets, sources = [target], [source]
    else:
        targets = [*target.parameters(), *target.buffers()]
        sources = [*source.parameters(), *source.buffers()]
    mine, theirs = ([tuple(getattr(t, "ds_shape", t.shape)) for t in side] for side in (targets, sources))
    if mine != theirs:
        raise DeepSpeedConfigError(
            f"compression_training.layer_reduction: {name} of student and teacher have different shapes: {mine} and "
            f"{theirs}; build the student with the shapes of the teacher"
        )
    return list(zip(targets, sources, strict=True))
