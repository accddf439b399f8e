"""AutoEP: spreads the experts of an ordinary Transformers model over ranks, by the configuration alone.

Works on the form that all mixture-of-experts models of the Transformers library (5.0 and newer) share: a module with
stacked weights that gets tokens, chosen experts and weights. No list of models or module names is needed: the router,
shared experts, scaling and balance loss stay the model's own.
"""

from __future__ import annotations

import fnmatch
import re

import torch
from torch import nn

from deepspeed.axes import EXPERT
from deepspeed.comm.job.expert_groups import group_name
from deepspeed.comm.job.groups import declare_expert_groups
from deepspeed.comm.job.job import Job, rank_in
from deepspeed.comm.transports.transport import TensorTransfer, Transport
from deepspeed.config.sections.expert_parallel import ExpertParallel
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.logging import log_dist
from deepspeed.models.configurations import model_type_of
from deepspeed.models.stacked_experts import lacks
from deepspeed.parallel.expert.activations import check_activation
from deepspeed.parallel.expert.spread import Spread, is_stack, rows_in, spread, spread_of, stack_rows
from deepspeed.parallel.stages import is_stage, raise_for_all_stages
from deepspeed.zero.access.gathered import GatheredParameters
from deepspeed.zero.address import address_of, full_shape
from deepspeed.zero.tiling.parts import has_part, say_part
from deepspeed.zero.tiling.tiles import TilePart

_PRESETS = {
    "mixtral": ("mixtral",),
    "qwen3_moe": ("qwen3_moe", "qwen2_moe"),
    "qwen3_5_moe": ("qwen3_5_moe", "qwen3_5_moe_text"),
    "deepseek_v2": ("deepseek_v2",),
    "deepseek_v3": ("deepseek_v3",),
    "minimax_m3": ("minimax_m3", "minimax_m3_vl", "minimax_m3_vl_text"),
}
"""The Transformers model types that each preset of upstream stands for."""

ReplacedParameters = dict[int, nn.Parameter]
"""New parameters, by the ``id`` of those that they replaced."""


def spread_experts(
    job: Job,
    model: nn.Module,
    section: ExpertParallel,
    peers: Transport,
    device: torch.device,
    *,
    data_first: bool = False,
) -> ReplacedParameters:
    """Spreads the experts of ``model`` over ranks, in place. Every rank of the job must call it.

    Each rank keeps ``E / ep`` experts of every module with stacked experts. Modules are cut one after another; where
    ``zero.Init`` has sharded the model, only one module at a time is gathered.

    Args:
        section: ``expert_parallel``, enabled.
        peers: The ranks that hold the same part of the rest of the model; the first one's values count.
        device: Where the model computes.
        data_first: ``use_data_before_expert_parallelism``.

    Returns:
        The parameters that were replaced by new objects; the others were cut in place, so optimizers still refer to
        them.

    Raises:
        DeepSpeedConfigError: The model has no such module, or does not fit what the section requests.
    """
    _check_preset(model, section)
    found = _found_by_stages(job, model, section, device)
    ep_size = section.autoep_size
    declare_expert_groups(ep_size, data_first or None)
    job.experts.make_groups(ep_size)
    if ep_size > 1:
        job.axis(EXPERT, size=ep_size, device=device).transport("layers")
    assignment = _ExpertAssignment(job, ep_size, peers, device)
    exchanged: ReplacedParameters = {}
    for name, module in found.items():
        if spread_of(module) is not None:
            _mark_parts(name, module, assignment)  # this rank's place may differ from that in an earlier job
        else:
            exchanged |= _cut(name, module, assignment)
            _state(module).grouped = section.use_grouped_mm
            _state(module).is_coded = section.dispatch_dtype == "int8"
            _state(module).activation = section.expert_activation
    experts = sorted({_state(module).num_experts for module in found.values()})
    where = "this stage has " if is_stage(model) else ""
    numbers = " or ".join(map(str, experts)) or "no"
    log_dist(f"expert_parallel: {where}{len(found)} layers of {numbers} experts, divided over {ep_size} ranks")
    return exchanged


def spread_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the modules of ``model`` whose experts are spread, by name."""
    return {name: module for name, module in model.named_modules() if spread_of(module) is not None}


# -- finding modules ---------------------------------------------------------------------------------------------------


class _NoExpertsError(DeepSpeedConfigError):
    """The model has no experts that could be spread. Allowed for a stage of a pipeline if another stage has some."""


def _found_by_stages(job: Job, model: nn.Module, section: ExpertParallel, device: torch.device) -> dict[str, nn.Module]:
    """Returns the modules of this rank. An error on any stage is raised on every rank."""
    found: dict[str, nn.Module] = {}
    problem: DeepSpeedConfigError | None = None
    try:
        found = _modules(model, section)
        for name, module in found.items():
            _check_module(name, module, section)
            _check_adapters(name, model)
    except DeepSpeedConfigError as error:
        problem = error
    raise_for_all_stages(job, model, device, len(found), problem, _NoExpertsError, label="the experts of the stages")
    return found


def _check_module(name: str, module: nn.Module, section: ExpertParallel) -> None:
    known = spread_of(module)
    if known is None and (missing := lacks(module, stack_rows(module))) is not None:
        raise DeepSpeedConfigError(
            f"expert_parallel: the experts {name!r} ({type(module).__name__}) lack {missing}; "
            "leave the section out, or build such layers with deepspeed.moe.layer.MoE"
        )
    check_activation(section.expert_activation, name, module)
    rows = stack_rows(module) if known is None else known.rows
    experts = rows["down_proj"]
    for stack, length in rows.items():
        if length % section.autoep_size:
            what = f"{experts} experts" if length == experts else f"{length} rows of {stack}, beside {experts} experts,"
            raise DeepSpeedConfigError(
                f"expert_parallel.autoep_size {section.autoep_size}: the {what} of {name!r} cannot be divided evenly; "
                f"choose a divisor of {length}"
            )
    if known is not None and known.ep_size != section.autoep_size:
        raise DeepSpeedConfigError(
            f"expert_parallel.autoep_size {section.autoep_size}: the experts {name!r} are spread over {known.ep_size} "
            "ranks already; load the model with the configuration that initialize gets"
        )


def _check_adapters(name: str, model: nn.Module) -> None:
    """Raises if an adapter (PEFT's ``target_parameters``) adds to stacked weights: it would need the whole stack."""
    above, _, last = name.rpartition(".")
    wrapper = model.get_submodule(above)
    if last == "base_layer" and hasattr(wrapper, "parameter_name"):
        raise DeepSpeedConfigError(
            f"expert_parallel: {type(wrapper).__name__} adapts the weight {wrapper.parameter_name!r} of the experts "
            f"{name!r}, whose parts would lie on several ranks; adapt layers outside of the experts (target_modules "
            "instead of target_parameters), or leave the expert_parallel section out"
        )


def _modules(model: nn.Module, section: ExpertParallel) -> dict[str, nn.Module]:
    stacks = {name: module for name, module in model.named_modules() if is_stack(module)}
    patterns = {
        "moe_layer_pattern": (section.moe_layer_pattern, lambda name: name.rpartition(".")[0]),
        "expert_pattern": (section.expert_pattern, lambda name: name.rpartition(".")[2]),
    }
    for key, (pattern, part) in patterns.items():
        if pattern is None:
            continue
        fitting = {name: module for name, module in stacks.items() if _fits(part(name), pattern)}
        if stacks and not fitting:
            raise _NoExpertsError(
                f"expert_parallel.{key} {pattern!r} matches none of the modules with stacked experts of "
                f"{type(model).__name__}: {', '.join(map(repr, list(stacks)[:4]))}; leave the key out, such "
                "modules are found automatically"
            )
        stacks = fitting
    if not stacks:
        likely = ("experts", "expert", "moe")
        named = [
            f"{name!r} ({type(module).__name__})"
            for name, module in model.named_modules()
            if name.rpartition(".")[2] in likely
        ][:3]
        raise _NoExpertsError(
            f"expert_parallel.enabled: {type(model).__name__} has no module with stacked experts (parameters "
            f"gate_up_proj or up_proj and down_proj with three dimensions)"
            f"{'; it has ' + ', '.join(named) if named else ''}. Most models of Transformers 5 have such "
            "modules; build other models with deepspeed.moe.layer.MoE, or leave the section out"
        )
    return stacks


def _fits(name: str, pattern: str) -> bool:
    """Returns whether a pattern fits: a regular expression as upstream takes it, or a file-name pattern."""
    try:
        if re.search(pattern, name):
            return True
    except re.error:
        pass
    return fnmatch.fnmatch(name, pattern)


def _check_preset(model: nn.Module, section: ExpertParallel) -> None:
    kind = model_type_of(model)
    if section.preset_model is not None and kind is not None and kind not in _PRESETS[section.preset_model]:
        raise DeepSpeedConfigError(
            f"expert_parallel.preset_model {section.preset_model!r} is for models of type "
            f"{' or '.join(_PRESETS[section.preset_model])}, but this one is {kind!r}; leave the key out, as the "
            "structure is read from the model"
        )


# -- cutting -----------------------------------------------------------------------------------------------------------


def _state(module: nn.Module) -> Spread:
    state = spread_of(module)
    assert state is not None
    return state


class _ExpertAssignment:
    """Describes which rank keeps which experts."""

    def __init__(self, job: Job, ep_size: int, peers: Transport, device: torch.device) -> None:
        self.ep_size = ep_size  # ranks that share them
        self._joins = job.awaits_copies
        self._peers = peers
        self._device = device
        declared = job.experts.declare(ep_size)
        # this rank's place among these
        self.place = next(ranks.index(rank_in()) for ranks in declared.sharing if rank_in() in ranks)
        # The first of the ranks that hold the same experts; it hands on to the others when an engine takes them.
        everyone = peers.ranks or (rank_in(),)
        self._firsts = [ranks[0] for ranks in declared.same if ranks[0] in everyone]
        self._place_of = {first: place for place, first in enumerate(self._firsts)}

    def mine(self, state: Spread, rows: int) -> list[tuple[int, int]]:
        """Returns the intervals of a stack of ``rows`` that this rank keeps."""
        return state.intervals(rows, self.place)

    def out(self, weight: torch.Tensor, state: Spread) -> torch.Tensor:
        """Returns this rank's part of a stacked weight, with the first rank's values. Every rank must call it."""
        kept = rows_in(weight, self.mine(state, len(weight)))
        # A rank that joins a running job meets ranks whose experts are already spread; its values come from replicas.
        if self._peers.size == 1 or self._joins:
            return kept
        me, everyone = rank_in(), self._peers.ranks
        arrived = torch.empty_like(kept, device=self._device)
        transfers = []
        for rank in self._firsts:
            if rank == everyone[0]:
                continue
            tensor = arrived if me == rank else None
            if me == everyone[0]:
                tensor = rows_in(weight, state.intervals(len(weight), self._place_of[rank])).to(self._device)
            transfers.append(TensorTransfer(0, everyone.index(rank), None if tensor is None else tensor.contiguous()))
        self._peers.move(transfers, label="the experts of the first rank")
        if me in self._firsts and me != everyone[0]:
            kept.copy_(arrived)
        return kept


def _cut(name: str, module: nn.Module, assignment: _ExpertAssignment) -> ReplacedParameters:
    """Removes other ranks' experts from a module, and makes it send tokens to the ranks that have them."""
    state = Spread.of(module, assignment.ep_size)
    exchanged: ReplacedParameters = {}
    if assignment.ep_size > 1:
        for own in state.rows:
            parameter = module._parameters[own]
            assert parameter is not None
            if has_part(parameter):
                raise DeepSpeedConfigError(
                    f"expert_parallel: the parameter {name}.{own} is cut over tensor-parallel ranks already; leave "
                    "experts out of the tensor_parallel section, or the expert_parallel section"
                )
            part = _cut_parameter(module, own, state, assignment)
            if part is not parameter:
                exchanged[id(parameter)] = part
            part.allreduce = False  # type: ignore[attr-defined]
            part.group_name = group_name(assignment.ep_size)  # type: ignore[attr-defined]
    spread(module, state)
    _mark_parts(name, module, assignment)
    return exchanged


def _mark_parts(name: str, module: nn.Module, assignment: _ExpertAssignment) -> None:
    """Marks each stack of a spread module with the experts that this rank has."""
    state = _state(module)
    for own, rows in state.rows.items():
        parameter = module._parameters[own]
        if parameter is not None and getattr(parameter, "group_name", None) == group_name(assignment.ep_size):
            shape = (rows, *full_shape(parameter)[1:])
            part = TilePart.cut(f"{name}.{own}" if name else own, shape, 0, assignment.mine(state, rows))
            say_part(parameter, part)


@torch.no_grad()
def _cut_parameter(module: nn.Module, own: str, state: Spread, assignment: _ExpertAssignment) -> nn.Parameter:
    parameter: nn.Parameter = module._parameters[own]  # type: ignore[assignment]
    if address_of(parameter) is None:
        parameter.data = assignment.out(parameter.data, state)
        return parameter
    with GatheredParameters([parameter]):  # all ranks have the same values
        kept = rows_in(parameter.detach(), assignment.mine(state, len(parameter)))
    made = nn.Parameter(kept, requires_grad=parameter.requires_grad)
    module._parameters[own] = made
    return made
