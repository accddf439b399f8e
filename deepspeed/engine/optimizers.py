"""Chooses the torch optimizer from what the caller gave; refuses what it cannot be used with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from deepspeed import comm
from deepspeed.config.sections.root import Root
from deepspeed.engine_feature import Conflict, ConflictKey, EngineSetup, refuse_conflicts
from deepspeed.errors import DeepSpeedConfigError, NotYetSupportedError
from deepspeed.logging import log_dist
from deepspeed.ops.build import build_optimizer
from deepspeed.ops.elementwise import OptimizerKind, is_elementwise, supports_flat_update, why_not_flat
from deepspeed.precision.policy import has_narrow_masters
from deepspeed.zero.group import Groups
from deepspeed.zero.placement import Placement, Tier
from deepspeed.zero.tiling.describe import ROWS, describe
from deepspeed.zero.tiling.layout import DATA
from deepspeed.zero.update.driver import DRIVER

_UNUSABLE = (torch.optim.LBFGS, torch.optim.SparseAdam)


def model_parameter_groups(model: nn.Module, model_parameters: Any) -> list[Any]:
    """Returns the caller's ``model_parameters`` as a list of parameters or of group dicts.

    Args:
        model: The model; its parameters are taken where ``model_parameters`` is None.
        model_parameters: List, generator or filter of parameters, group dicts, ``(name, parameter)`` pairs, or None.
            One list or group of all trained parameters of layers that were built again means those of the new layers.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if model_parameters is None:
        return trained
    entries: list[Any] = (
        [model_parameters] if isinstance(model_parameters, (torch.Tensor, dict)) else list(model_parameters)
    )
    entries = [entry[1] if isinstance(entry, tuple) else entry for entry in entries]  # named_parameters()
    if entries and isinstance(entries[0], dict):
        params = [[p] if isinstance(p, torch.Tensor) else list(p) for p in (group["params"] for group in entries)]
        groups = [{**group, "params": own} for group, own in zip(entries, params, strict=True)]
        if len(groups) == 1 and _are_all_replaced(model, groups[0]["params"]):
            groups[0]["params"] = trained
        return groups
    return trained if _are_all_replaced(model, entries) else entries


def _are_all_replaced(model: nn.Module, given: list[Any]) -> bool:
    """Returns whether these are the trained parameters that a pipeline had before its layers were built again."""
    replaced = _replaced_parameters(model)
    return replaced is not None and {id(parameter) for parameter in given} == {id(parameter) for parameter in replaced}


def _replaced_parameters(model: nn.Module) -> list[Any] | None:
    """Returns those parameters from before layers were built again that still exist; None where no layers were."""
    references = getattr(model, "replaced_parameters", None)
    return None if references is None else [found for find in references if (found := find()) is not None]


def exchange_parameters(given: Any, exchanged: Mapping[int, nn.Parameter]) -> Any:
    """Returns the caller's parameters or groups of them with replaced parameters exchanged for the new ones."""
    if not exchanged or given is None:
        return given
    if isinstance(given, torch.optim.Optimizer):
        for group in given.param_groups:
            group["params"] = exchange_parameters(group["params"], exchanged)
        return given
    if isinstance(given, torch.Tensor):
        return exchanged.get(id(given), given)
    if isinstance(given, dict):
        return {**given, "params": exchange_parameters(given["params"], exchanged)}
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], str):
        return given[0], exchange_parameters(given[1], exchanged)
    return [exchange_parameters(entry, exchanged) for entry in given]


def choose_optimizer(
    root: Root, model: nn.Module, optimizer: Any, model_parameters: Any, placement: Placement
) -> torch.optim.Optimizer | None:
    """Returns the torch optimizer: the client's instance, what its callable returns, the configured one, or None.

    Raises:
        DeepSpeedConfigError: The client's object is neither, or a parameter is not the model's or occurs twice.
    """
    # A pipeline stage that trains nothing still joins the agreement of an update, with an empty param group.
    may_be_empty = bool(getattr(model, "is_part_of_model", False))
    if isinstance(optimizer, torch.optim.Optimizer):
        chosen: torch.optim.Optimizer | None = optimizer
    elif callable(optimizer):
        groups = model_parameter_groups(model, model_parameters)
        chosen = optimizer(groups or ([{"params": []}] if may_be_empty else []))
        if not isinstance(chosen, torch.optim.Optimizer):
            raise DeepSpeedConfigError(
                f"initialize(optimizer=...): the callable returned {type(chosen).__name__}; expected a torch.optim."
                "Optimizer built on the parameters it is given"
            )
    elif optimizer is not None:
        raise DeepSpeedConfigError(
            f"initialize(optimizer=...): expected a torch.optim.Optimizer, a callable that builds one, or None; "
            f"found {type(optimizer).__name__}"
        )
    elif root.optimizer is not None and root.optimizer.type is not None:
        groups = model_parameter_groups(model, model_parameters)
        chosen = (
            build_optimizer(
                root.optimizer.type,
                dict(root.optimizer.params),
                groups,
                offload=placement.master_tier is not Tier.DEVICE,
                may_be_empty=may_be_empty,
            )
            if groups or may_be_empty
            else None
        )
    else:
        chosen = None
    if optimizer is not None and root.optimizer is not None and root.optimizer.type is not None:
        log_dist(
            f"initialize(optimizer=...): {type(chosen).__name__} is used, and the section optimizer of the "
            f"configuration ({root.optimizer.type}) has no effect"
        )
    if chosen is not None:
        _check_groups(chosen, model)
    return chosen


def _check_groups(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    known = {id(parameter): name for name, parameter in model.named_parameters()}
    replaced = {id(parameter) for parameter in _replaced_parameters(model) or ()}
    seen: set[int] = set()
    for number, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if id(parameter) in replaced and id(parameter) not in known:
                raise DeepSpeedConfigError(
                    "pipeline.schedule divides the layers differently from the PipelineModule, so they were built "
                    f"again, after the optimizer or its param groups: parameter {position} of param group {number} "
                    f"(shape {tuple(parameter.shape)}) belongs to a layer from before. Pass schedule (and num_chunks) "
                    "to PipelineModule instead, or a function that builds the optimizer as initialize(optimizer=...)"
                )
            if id(parameter) not in known:
                raise DeepSpeedConfigError(
                    f"optimizer: parameter {position} of param group {number} (shape {tuple(parameter.shape)}) is not "
                    "a parameter of the model given to initialize; build the optimizer on that model's parameters, "
                    "after any change of the model"
                )
            if id(parameter) in seen:
                raise DeepSpeedConfigError(
                    f"optimizer: parameter {known[id(parameter)]!r} occurs twice in the param groups (again in group "
                    f"{number}); list it once"
                )
            seen.add(id(parameter))
            if parameter.requires_grad and parameter.is_complex():
                raise DeepSpeedConfigError(
                    f"optimizer: parameter {known[id(parameter)]!r} (param group {number}) is {parameter.dtype}; "
                    "expected a real dtype, in which gradients are combined and masters kept. Make the parameter real "
                    "(torch.view_as_real of the weight) and use torch.view_as_complex in forward, or freeze it"
                )


def _without_flat_update(setup: EngineSetup) -> str | None:
    optimizer = setup.optimizer
    is_refused = optimizer is not None and not supports_flat_update(optimizer)
    return f"with the optimizer {type(optimizer).__name__} ({why_not_flat(optimizer)})" if is_refused else None


def _without_rounding(setup: EngineSetup) -> str | None:
    if setup.optimizer is not None and hasattr(setup.optimizer, DRIVER) and supports_flat_update(setup.optimizer):
        return f"with the optimizer {type(setup.optimizer).__name__} (its ranks exchange states in fp32)"
    return _without_flat_update(setup)


def _updates_files(setup: EngineSetup) -> bool:
    section = setup.root.zero_optimization.offload_optimizer
    return section is not None and section.device == "nvme"


def _updates_early(setup: EngineSetup) -> bool:
    section = setup.root.zero_optimization.offload_optimizer
    return section is not None and section.super_offload


def _has_files(setup: EngineSetup) -> bool:
    section = setup.root.zero_optimization.offload_param
    return _updates_files(setup) or (section is not None and section.device == "nvme")


_FLAT = "use an optimizer of this package, or torch's Adam, AdamW, Adagrad or SGD"
_NARROW = "bf16_master_weights_and_grads / fp16_master_weights_and_grads"
_SUPER = "zero_optimization.offload_optimizer.super_offload"
_NO_FLAT_UPDATE = ConflictKey("optimizers without an update of flat runs", _without_flat_update)
CONFLICTS = (
    Conflict(
        'zero_optimization.offload_optimizer.device "nvme"',
        _updates_files,
        _NO_FLAT_UPDATE,
        "files are updated chunk by chunk, which its step cannot do",
        f'{_FLAT}, or device "cpu"',
    ),
    Conflict(
        _SUPER,
        _updates_early,
        _NO_FLAT_UPDATE,
        "expected one whose update of single buckets can be made and thrown away",
        f"{_FLAT}, or set super_offload to false",
    ),
    *(
        Conflict(_NARROW, lambda setup: has_narrow_masters(setup.root), *conflict)
        for conflict in (
            (
                ConflictKey("optimizers without an elementwise update", _without_rounding),
                "16-bit masters need an elementwise update whose results are rounded stochastically",
                f"{_FLAT}, or fp32 masters",
            ),
            (
                ConflictKey(
                    "updates before the norm", lambda setup: f"with {_SUPER}" if _updates_early(setup) else None
                ),
                "a second set of masters is kept for fp32 only",
                "set one of them to false",
            ),
            (
                ConflictKey("files", lambda s: 'with offload to "nvme"' if _has_files(s) else None),
                "expected masters on the device or in host memory, since chunks in files are laid out for fp32",
                'use device "cpu", or fp32 masters',
            ),
        )
    ),
)
"""What optimizers and the places of their states exclude, whichever features there are."""


def check_optimizer(setup: EngineSetup, placement: Placement, optimizer: torch.optim.Optimizer | None) -> None:
    """Refuses an optimizer by :data:`CONFLICTS`, and stages 1 and 2 without an optimizer.

    Raises:
        DeepSpeedConfigError: Names it, and what to change.
    """
    if optimizer is None and placement.shard_master and not placement.shard_params:
        raise DeepSpeedConfigError(
            f"zero_optimization.stage {placement.stage} shards optimizer states, but there is no optimizer; give "
            "initialize an optimizer or an `optimizer` section, or use stage 0, or stage 3 to shard the parameters"
        )
    if optimizer is not None:
        refuse_conflicts(CONFLICTS, replace(setup, optimizer=optimizer))


def needs_whole_tensors(optimizer: torch.optim.Optimizer, placement: Placement, root: Root) -> bool:
    """Returns whether the optimizer works on tensors in the parameters' shapes.

    Raises:
        DeepSpeedConfigError: It does, and the ZeRO stage cuts parameters.
    """
    verdict = is_elementwise(optimizer)
    if verdict.kind in (OptimizerKind.ELEMENTWISE, OptimizerKind.FRAGMENTS):
        return False
    name = type(optimizer).__name__
    if isinstance(optimizer, _UNUSABLE):
        raise DeepSpeedConfigError(f"optimizer {name}: it {verdict.reason}; no engine step can do that. Use AdamW")
    if not placement.shard_master:
        return True
    if verdict.kind is OptimizerKind.UNKNOWN and root.zero_allow_untested_optimizer:
        log_dist(
            f"optimizer {name} {verdict.reason}; zero_allow_untested_optimizer lets it work on flat fragments, which "
            "is right only if it treats every element by itself"
        )
        return False
    remedy = "use ZeRO stage 0, where it gets whole parameters, or an elementwise optimizer such as AdamW"
    if verdict.kind is OptimizerKind.UNKNOWN:
        remedy += "; if it is elementwise, declare it with zero_allow_untested_optimizer: true"
    raise DeepSpeedConfigError(
        f"optimizer {name} with zero_optimization.stage {placement.stage}: it {verdict.reason}, but this stage cuts "
        f"parameters into fragments; {remedy}"
    )


def refuse_cut_tensors(
    optimizer: torch.optim.Optimizer | None, model: nn.Module, groups: Groups, placement: Placement
) -> None:
    """Refuses an optimizer that needs whole tensors and would get parts of them, or parts from several groups.

    LAMB needs norms only, and sums them over the tensor-parallel ranks too. Muon handles each group's tensors
    separately. Every rank of the job must call it.

    Raises:
        NotYetSupportedError: The optimizer works on whole tensors, and parameters are in groups of their own.
    """
    if not callable(getattr(optimizer, "attach_segments", None)):
        return
    other_parts = groups.other_parts if vars(type(optimizer)).get("_adds_norms_of_parts", False) else None
    takes_tables = vars(type(optimizer)).get("_takes_tables_of_groups", False)
    parts = []
    for name, parameter in model.named_parameters():
        group = groups[groups.name_of(name, describe(name, parameter))]
        if group.is_part and not group.spans_stages and other_parts is not None:
            parts.append(f"{name}: a part of it, whose norms LAMB adds up")
        elif group.is_part or (group.name != DATA and placement.shard_master and not takes_tables):
            if group.name == ROWS:
                advice = ", Muon or ZeRO stage 0, or set sparse_gradients to false"
            else:
                advice = " (where only tensor parallelism cuts it, Lamb works too)"
            raise NotYetSupportedError(
                f"the optimizer {type(optimizer).__name__} works on whole tensors, but has {name!r} in the group "
                f"{group.name!r}, whose ranks hold a part of it or share it among themselves; use an optimizer that "
                f"works element by element, such as AdamW{advice}"
            )
    if other_parts is not None:
        comm.check_same_model(parts, other_parts.group)
