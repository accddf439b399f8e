"""Cuts a model over the tensor axis of the job, as the configuration asks, before an engine takes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from deepspeed import comm
from deepspeed.comm.job.groups import group_along
from deepspeed.comm.job.job import Job
from deepspeed.comm.job.mesh import SAME_PART, TENSOR, Mesh
from deepspeed.comm.job.world import rank_in
from deepspeed.comm.transports.channel import Channel
from deepspeed.comm.transports.transport import Transport
from deepspeed.config.sections.tensor_parallel import TensorParallel
from deepspeed.engine_feature import mark
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.logging import log_dist
from deepspeed.models.anatomy import output_head
from deepspeed.models.head import takes_loss_function, use_loss_function
from deepspeed.parallel.expert.auto import spread_modules
from deepspeed.parallel.stages import gather_from_stages, is_pipeline, is_stage, raise_for_all_stages
from deepspeed.parallel.tensor import rules as rules_module
from deepspeed.parallel.tensor.attention import set_head_counts, slice_arguments
from deepspeed.parallel.tensor.batches import BatchCheck, same_random_states
from deepspeed.parallel.tensor.channel import connect, connect_lists
from deepspeed.parallel.tensor.layout import Layout, describe, layout_of
from deepspeed.parallel.tensor.linear import ColumnLinear
from deepspeed.parallel.tensor.making import Maker, cut_parameter
from deepspeed.parallel.tensor.request import check_group
from deepspeed.parallel.tensor.rules import CutRule, CutStyle
from deepspeed.parallel.tensor.sequence import ScatterPlan, cut_sequences, plan_of
from deepspeed.parallel.tensor.structure import of_structure, summed_inside
from deepspeed.parallel.tensor.verify import ConsistencyCheck, inputs_of
from deepspeed.parallel.tensor.vocabulary import VocabularyEmbedding, causal_loss, vocab_parallel_cross_entropy
from deepspeed.zero.address import full_shape
from deepspeed.zero.gather.sharded_parameter import ShardedParameter

CUT = "ds_autotp_parsed"  # the name that programs ask for


@dataclass
class CutModel:
    """What was done to a model.

    Attributes:
        channel: The ranks that share its layers.
        layout: The cuts.
        counts: By name of the bucket groups of parameters that several tensor ranks have: whether this rank counts.
    """

    channel: Channel
    layout: Layout
    counts: dict[str, bool] = field(default_factory=dict)


def cut_model(model: nn.Module, section: TensorParallel, mesh: Mesh, device: torch.device) -> CutModel | None:
    """Cuts a model in place. Every rank of the job must call it, with the same model.

    Args:
        model: Whole on every rank, or sharded by ``zero.Init``. Values of the first rank of a tensor group win.
        section: The configuration.
        mesh: Of the job.
        device: Where the model will compute.

    Returns:
        What was done; the same again for a model that was cut before; None where there is nothing to cut.

    Raises:
        DeepSpeedConfigError: The model cannot be cut so, or computes something else afterwards. In the first case
            nothing was changed.
    """
    size = mesh.size(TENSOR)
    known = getattr(model, CUT, None)
    if isinstance(known, CutModel):
        return known
    if size == 1 or section.autotp_size <= 1:
        return None
    check_group(model, mesh.group(rank_in(), TENSOR))
    rules = _rules_by_stages(model, section, device)
    layout = layout_of(model, rules, size, grain=section.tensor_parallel.tp_grain_size)
    sequences = _sequences_by_stages(model, layout, device) if section.sequence_parallel_norms else None
    comm.check_same_model(_lines(model), group_along(TENSOR))
    channel = connect(mesh, device, comm.default_timeout())
    replicas = _replicas(model, layout, mesh, device)
    with torch.no_grad():
        _spread(model, channel, device)
    data = (
        Job.current()
        .axis_of(group_along(*SAME_PART))
        .transport("outside engines", device=device, timeout=comm.default_timeout())
    )
    check = ConsistencyCheck.before(model, layout, section, device)
    made = CutModel(channel, layout)
    with torch.no_grad():
        _cut_parameters(model, layout, made, data)
    maker = Maker(model, channel, replicas)
    for layer in layout.layers:
        maker.make(layer)
    for name, (attention, heads) in layout.heads.items():
        set_head_counts(model.get_submodule(name), attention, heads, channel.rank)
        slice_arguments(model.get_submodule(name), attention, heads, channel.rank)
    if sequences is not None:
        cut_sequences(model, sequences, channel)
    _use_parallel_loss(model, section, channel, device)
    setattr(model, CUT, made)
    mark(model, "deepspeed.parallel.tensor.feature")
    log_dist(f"tensor parallelism over {size} ranks:\n{describe(layout)}")
    if check is not None:
        check.after(model, channel)
    same_random_states(channel)
    BatchCheck(channel, cuts_between_stages=sequences is not None and is_pipeline(model)).attach(model)
    return made


def is_cut(model: nn.Module) -> bool:
    """Returns whether :func:`cut_model` has cut it."""
    return isinstance(getattr(model, CUT, None), CutModel)


class _NoPlanError(DeepSpeedConfigError):
    """Nothing says how a model is cut; a stage of a pipeline may have no layers to cut."""


def _rules_by_stages(model: nn.Module, section: TensorParallel, device: torch.device) -> dict[str, CutRule]:
    """Returns the rules for what this rank has of a model. Every rank raises what is wrong with those of any stage."""
    rules: dict[str, CutRule] = {}
    problem: DeepSpeedConfigError | None = None
    try:
        rules = rules_for(model, section)
    except DeepSpeedConfigError as error:
        problem = error
    raise_for_all_stages(
        model, device, len(rules), problem, _NoPlanError, label="the tensor-parallel cuts of the stages"
    )
    return rules


def _sequences_by_stages(model: nn.Module, layout: Layout, device: torch.device) -> ScatterPlan | None:
    """Returns where the sequence is cut. Every rank raises what speaks against it on any stage."""
    plan: ScatterPlan | None = None
    problem: DeepSpeedConfigError | None = None
    try:
        plan = plan_of(model, layout)
    except DeepSpeedConfigError as error:
        problem = error
    label = "the cuts of sequences between the layers of the stages"
    raise_for_all_stages(model, device, int(plan is not None), problem, _NoPlanError, label=label)
    return plan


def rules_for(model: nn.Module, section: TensorParallel) -> dict[str, CutRule]:
    """Returns the rules for a model, from the first source that has any.

    Raises:
        DeepSpeedConfigError: None has.
    """
    own = rules_module.of_user(model, section)
    found: dict[str, CutRule] = {}
    if all(
        rule.way in (CutStyle.WHOLE, CutStyle.SUMMED) for rule in own.values()
    ):  # exceptions from what the model says
        found = rules_module.of_plan(model) if section.injection_policy_tuple is None else {}
        found = found or of_structure(model, inputs_of(model), section.injection_policy_tuple or ())
    found |= own
    found |= summed_inside(model, inputs_of(model), found)
    spread = tuple(f"{name}." for name in spread_modules(model))  # experts that have other ranks already stay whole
    found = {name: rule for name, rule in found.items() if not f"{name}.".startswith(spread)} if spread else found
    if not found:
        structure = (
            "its structure was not read, as the inputs of its forward are known for Transformers models only"
            if inputs_of(model) is None
            else "its structure shows no pair of layers around a residual sum"
        )
        raise _NoPlanError(
            f"tensor_parallel.autotp_size {section.autotp_size}: nothing says how {type(model).__name__} is cut; it "
            f"brings no tensor-parallel plan, and {structure}. Write tensor_parallel.partition_config: layer_specs "
            'with patterns for the layers that take the residual stream (partition_type "column") and for those that '
            'give back to it ("row"), or name the latter in tensor_parallel.injection_policy_tuple'
        )
    if section.vocab_parallel_lm_head is not None:
        found = {name: _head_rule(model, name, rule, section.vocab_parallel_lm_head) for name, rule in found.items()}
    return found


def _head_rule(model: nn.Module, name: str, rule: CutRule, is_cut: bool) -> CutRule:
    head = output_head(model)
    if head is None or model.get_submodule(name) is not head or rule.way is not CutStyle.COLUMN_GATHERED:
        return rule
    return CutRule(CutStyle.COLUMN if is_cut else CutStyle.WHOLE, "vocab_parallel_lm_head")


def _use_parallel_loss(model: nn.Module, section: TensorParallel, channel: Channel, device: torch.device) -> None:
    if not section.vocab_parallel_lm_head:
        return
    problem = None
    has_head = not is_stage(model) or output_head(model) is not None
    if has_head and not _has_parallel_loss(model, channel):
        problem = DeepSpeedConfigError(
            f"tensor_parallel.vocab_parallel_lm_head: {type(model).__name__} has no output layer that is cut over the "
            "vocabulary and computes a causal language model's loss; leave the key out"
        )
    label = "the loss of logits that are cut over the vocabulary"
    raise_for_all_stages(model, device, int(has_head), problem, _NoPlanError, label=label)
    log_dist("tensor_parallel.vocab_parallel_lm_head: every rank's logits are those of its part of the vocabulary")


def _has_parallel_loss(model: Any, channel: Channel) -> bool:
    """Gives the model a loss of cut logits; returns whether it has such logits and takes such a loss."""
    head = output_head(model)
    cut: Any = getattr(head, "tensor_cut", None)
    if isinstance(head, VocabularyEmbedding):  # of a pipeline, whose tied head has no module of its own
        assert head.tensor_cut.projection is not None
        head.tensor_cut.projection.is_gathered = False
    elif not isinstance(head, ColumnLinear) or cut.is_gathered:
        return False
    if hasattr(model, "use_token_losses"):  # a pipeline, or a model of one's own
        extent = cut.split.extent
        return bool(model.use_token_losses(partial(vocab_parallel_cross_entropy, channel=channel, vocabulary=extent)))
    if takes_loss_function(model):
        use_loss_function(model, causal_loss(channel))
        return True
    return False


def _lines(model: nn.Module) -> list[str]:
    lines = [f"{name}: shape {full_shape(parameter)}" for name, parameter in model.named_parameters()]
    return [*lines, *(f"{name}: a buffer of shape {tuple(buffer.shape)}" for name, buffer in model.named_buffers())]


def _replicas(model: nn.Module, layout: Layout, mesh: Mesh, device: torch.device) -> Channel | None:
    """Returns the ranks that have the same key/value heads as this one; None where no stage has heads on several ranks.

    Every rank of the job must call it: all of them make the groups, also those of a stage without attention.
    """
    mine = {
        tuple(heads.replicas(place) for place in range(heads.size))
        for _, heads in layout.heads.values()
        if heads.size > heads.key_value
    }
    gathered = gather_from_stages(model, device, sorted(mine), label="the key/value heads of the stages")
    kinds = {tuple(map(tuple, kind)) for entries in gathered for kind in entries}
    if not kinds:
        return None
    if len(kinds) > 1:
        raise DeepSpeedConfigError(
            f"tensor_parallel.autotp_size {layout.size}: the attention layers of the model have different numbers of "
            f"key/value heads below {layout.size}, which cannot be divided; choose a smaller autotp_size"
        )
    (kind,) = kinds
    sets = sorted(set(kind))
    lists = [group[low:high] for group in mesh.groups(TENSOR) for low, high in sets]
    return connect_lists(lists, "shared heads", device, comm.default_timeout())


def _spread(model: nn.Module, channel: Channel, device: torch.device) -> None:
    """Gives all tensor ranks the values of the first: they may have been drawn from different seeds."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if isinstance(tensor, ShardedParameter) or tensor.numel() == 0 or tensor.is_meta:
            continue  # all ranks share it already, or will read it from files
        dense = tensor.detach().to(device).contiguous()
        channel.transport.broadcast(dense.view(-1).view(torch.uint8), 0, label=f"the first values of {name}")
        if dense.data_ptr() != tensor.data_ptr():
            tensor.data.copy_(dense)


def _cut_parameters(model: nn.Module, layout: Layout, made: CutModel, data: Transport) -> None:
    first_names = {id(parameter): name for name, parameter in model.named_parameters()}
    by_name: Mapping[str, Any] = dict(model.named_parameters(remove_duplicate=False))
    done: set[int] = set()
    place = made.channel.rank
    for name, cut in layout.parameters.items():
        parameter = by_name[name]
        if id(parameter) in done:
            continue
        done.add(id(parameter))
        low = cut.split.replicas(place)[0]
        group = None
        if any(stop - start > 1 for start, stop in map(cut.split.replicas, range(layout.size))):
            group = "tensor copies"
            made.counts[group] = place == low
        cut_parameter(parameter, cut, first_names[id(parameter)], made.channel, group, data)
