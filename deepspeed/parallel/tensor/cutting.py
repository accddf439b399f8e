"""Cuts a model over the tensor axis of the job, as configured, before an engine takes it.

One small forward and backward before the cut and one after it show whether the cut model computes the same as the whole
one.

Some errors of a plan show only in the results: a layer that must not be cut, packed parts in another order, a number of
heads that a module stores elsewhere, a gradient that is not summed. Where the model is small enough,
outputs and the gradients of the parameters that stay whole are compared.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from deepspeed import comm
from deepspeed.axes import SAME_PART, TENSOR
from deepspeed.comm.job.groups import group_along
from deepspeed.comm.job.job import Job, rank_in
from deepspeed.comm.job.mesh import Mesh
from deepspeed.comm.transports.channel import Channel
from deepspeed.comm.transports.transport import Transport
from deepspeed.config.sections.tensor_parallel import TensorParallel
from deepspeed.engine_feature import mark
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.logging import log_dist
from deepspeed.models.anatomy import output_head
from deepspeed.models.head import takes_loss_function, use_loss_function, use_token_losses
from deepspeed.models.inputs import small_inputs
from deepspeed.parallel.expert.auto import spread_modules
from deepspeed.parallel.stages import gather_from_stages, is_pipeline, is_stage, raise_for_all_stages
from deepspeed.parallel.tensor import rules as rules_module
from deepspeed.parallel.tensor.batches import BatchCheck, same_random_states
from deepspeed.parallel.tensor.channel import connect, connect_lists
from deepspeed.parallel.tensor.layout import Layout, ParameterCut, describe, layout_of
from deepspeed.parallel.tensor.linear import ColumnLinear, CutLinear
from deepspeed.parallel.tensor.making import (
    Maker,
    become_part,
    cut_parameter,
    set_features,
    set_head_counts,
    slice_arguments,
)
from deepspeed.parallel.tensor.request import check_group
from deepspeed.parallel.tensor.rules import CutRule, CutStyle
from deepspeed.parallel.tensor.sequence import cut_sequences, plan_of
from deepspeed.parallel.tensor.structure import SmallForwardError, of_structure, summed_inside
from deepspeed.parallel.tensor.vocabulary import VocabularyEmbedding, causal_loss, vocab_parallel_cross_entropy
from deepspeed.uncompiled import without_compiling
from deepspeed.zero.address import ShardedParameter, full_numel, full_shape
from deepspeed.zero.tiling.parts import mark_owners, part_owners_of

_T = TypeVar("_T")
CUT = "ds_autotp_parsed"  # the attribute that programs read
_COPIES = "tensor copies"


@dataclass
class CutModel:
    """A model's tensor-parallel cut."""

    channel: Channel  # the ranks that share its layers
    layout: Layout  # the cuts
    # by bucket group of parameters that several tensor ranks have: whether this rank counts them in norms
    counts: dict[str, bool] = field(default_factory=dict)
    connection: LayerConnection | None = None  # the channels to the other ranks of the job


@dataclass
class LayerConnection:
    """The channels between which the layers of a cut model exchange, in one job."""

    job: Callable[[], Job | None]
    channel: Channel  # the ranks that share its layers
    replicas: Channel | None  # the ranks that have the same key/value heads as this one; None: no others
    data: Transport  # the ranks that have the same parts and process other samples

    @classmethod
    def of(cls, job: Job, model: nn.Module, layout: Layout, mesh: Mesh, device: torch.device) -> LayerConnection:
        """Connects the ranks. Every rank of the job must call it, in the same order."""
        channel = connect(job, mesh, device, comm.default_timeout())
        replicas = _replicas(job, model, layout, mesh, device)
        axis = job.axis_of(job.group_along(*SAME_PART))
        data = axis.transport("outside engines", device=device, timeout=comm.default_timeout())
        return cls(weakref.ref(job), channel, replicas, data)

    def __deepcopy__(self, memo: Any) -> LayerConnection:
        return replace(self)  # a copied model communicates with the same ranks

    def continue_as(self, made: LayerConnection, model: nn.Module, *, moves: bool) -> None:
        """Switches to ``made``, of another job; with ``moves`` this rank may have another place in it."""
        self.channel.reconnect(made.channel, moves=moves)
        if self.replicas is not None and made.replicas is not None:
            self.replicas.reconnect(made.replicas, moves=moves)
        for parameter in model.parameters():
            if (owners := part_owners_of(parameter)) is not None:
                mark_owners(parameter, replace(owners, transport=self.channel.transport))
        self.job, self.data = made.job, made.data


def cut_model(job: Job, model: nn.Module, section: TensorParallel, mesh: Mesh, device: torch.device) -> CutModel | None:
    """Cuts a model in place, as configured. Every rank of the job must call it, with the same model.

    It is whole on every rank, or sharded by ``zero.Init``; all ranks of a tensor group take the values of its first. A
    model that was cut before is connected with the ranks of this job. Returns the cut; None if there is nothing to cut.

    Raises:
        DeepSpeedConfigError: The model cannot be cut so (nothing was changed then), or the cut model computes something
            else.
    """
    size = mesh.size(TENSOR)
    known = getattr(model, CUT, None)
    if isinstance(known, CutModel):
        if known.connection is not None and known.connection.job() is not job:
            connection = LayerConnection.of(job, model, known.layout, mesh, device)
            # The job lost all processes with one part; another rank takes it over and gets its values from a
            # checkpoint.
            moves = job.awaits_copies and connection.channel.rank != known.channel.rank
            if moves:
                _become_part(model, known, connection.channel.rank)
            known.connection.continue_as(connection, model, moves=moves)
            same_random_states(known.channel)
        return known
    if size == 1 or section.autotp_size <= 1:
        return None
    check_group(model, mesh.group(rank_in(), TENSOR))
    used = _specs_used_by_stages(job, model, section, device)
    what = "the tensor-parallel cuts of the stages"
    rules = _on_all_stages(job, model, device, what, lambda: rules_for(model, section, used)) or {}
    layout = layout_of(model, rules, size, grain=section.tensor_parallel.tp_grain_size)
    sequences = None
    if section.sequence_parallel_norms:
        what = "the cuts of sequences between the layers of the stages"
        sequences = _on_all_stages(job, model, device, what, lambda: plan_of(model, layout))
    # A rank that joins a running job skips the comparison: the others' models are cut already. It gets values later.
    joins = job.awaits_copies
    if not joins:
        comm.check_same_model(_lines(model), group_along(TENSOR))
    connection = LayerConnection.of(job, model, layout, mesh, device)
    channel = connection.channel
    if not joins:
        with torch.no_grad():
            _spread(model, channel, device)
    check = None if joins else ConsistencyCheck.before(model, layout, section, device)
    made = CutModel(channel, layout, connection=connection)
    with torch.no_grad():
        _cut_parameters(model, layout, made, connection.data)
    maker = Maker(model, channel, connection.replicas)
    for layer in layout.layers:
        maker.make(layer)
    for name, (attention, heads) in layout.heads.items():
        set_head_counts(model.get_submodule(name), attention, heads, channel.rank)
        slice_arguments(model.get_submodule(name), attention, heads, channel)
    if sequences is not None:
        cut_sequences(model, sequences, channel)
    _use_parallel_loss(job, model, section, channel, device)
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


_WRITE_RULES = (
    "Write tensor_parallel.partition_config: layer_specs with patterns for the layers that take the residual stream "
    '(partition_type "column") and for those that give back to it ("row"), or name the latter in '
    "tensor_parallel.injection_policy_tuple"
)


class _NoPlanError(DeepSpeedConfigError):
    """No rule cuts the model; a stage of a pipeline may have no layers to cut."""


def _on_all_stages(job: Job, model: nn.Module, device: torch.device, label: str, decide: Callable[[], _T]) -> _T | None:
    """Returns the decision for this rank's part of a model. An error on any stage is raised on every rank."""
    decision: _T | None = None
    problem: DeepSpeedConfigError | None = None
    try:
        decision = decide()
    except DeepSpeedConfigError as error:
        problem = error
    raise_for_all_stages(job, model, device, int(decision is not None), problem, _NoPlanError, label=label)
    return decision


def _specs_used_by_stages(job: Job, model: nn.Module, section: TensorParallel, device: torch.device) -> set[int]:
    """Returns the numbers of the ``layer_specs`` that fit a weight of any stage. Every rank of the job must call it."""
    if section.partition_config is None:
        return set()
    try:
        mine = rules_module.used_specs(model, section)
    except DeepSpeedConfigError:
        mine = []  # rules_for raises it again on this stage, and then on every rank
    label = "the tensor-parallel patterns that fit layers of the stages"
    return {number for numbers in gather_from_stages(job, model, device, mine, label=label) for number in numbers}


def rules_for(model: nn.Module, section: TensorParallel, used_elsewhere: Collection[int] = ()) -> dict[str, CutRule]:
    """Returns the rules for this rank's part of a model, from the first source that has any.

    Some ``layer_specs`` need not fit it: those ``used_elsewhere``, by other pipeline stages.

    Raises:
        DeepSpeedConfigError: No source has rules.
    """
    own = rules_module.of_user(model, section, used_elsewhere)
    found: dict[str, CutRule] = {}
    if all(rule.way in (CutStyle.WHOLE, CutStyle.SUMMED) for rule in own.values()):  # exceptions from the model's plan
        found = rules_module.of_plan(model) if section.injection_policy_tuple is None else {}
        try:
            found = found or of_structure(model, inputs_of(model), section.injection_policy_tuple or ())
        except SmallForwardError as error:
            raise DeepSpeedConfigError(
                f"tensor_parallel.autotp_size {section.autotp_size}: no rule cuts {type(model).__name__}; "
                f"it brings no tensor-parallel plan, and its structure was not read, as it does not run on "
                f"{', '.join(inputs_of(model) or ())} alone ({error}). {_WRITE_RULES}"
            ) from error
    found |= own
    found |= summed_inside(model, inputs_of(model), found)
    spread = tuple(f"{name}." for name in spread_modules(model))  # experts that have other ranks already stay whole
    found = {name: rule for name, rule in found.items() if not f"{name}.".startswith(spread)} if spread else found
    if not found:
        structure = (
            "its structure was not read, as the inputs of its forward are known for Transformers models of text only"
            if inputs_of(model) is None
            else "its structure shows no pair of layers around a residual sum"
        )
        raise _NoPlanError(
            f"tensor_parallel.autotp_size {section.autotp_size}: no rule cuts {type(model).__name__}; it "
            f"brings no tensor-parallel plan, and {structure}. {_WRITE_RULES}"
        )
    head = output_head(model)
    if section.vocab_parallel_lm_head is not None and head is not None:
        way = CutStyle.COLUMN if section.vocab_parallel_lm_head else CutStyle.WHOLE
        for name, rule in found.items():
            if rule.way is CutStyle.COLUMN_GATHERED and model.get_submodule(name) is head:
                found[name] = CutRule(way, "vocab_parallel_lm_head")
    return found


def _use_parallel_loss(
    job: Job, model: nn.Module, section: TensorParallel, channel: Channel, device: torch.device
) -> None:
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
    raise_for_all_stages(job, model, device, int(has_head), problem, _NoPlanError, label=label)
    log_dist("tensor_parallel.vocab_parallel_lm_head: every rank's logits are those of its part of the vocabulary")


def _has_parallel_loss(model: Any, channel: Channel) -> bool:
    """Gives the model a loss of cut logits; returns whether it has such logits and takes such a loss."""
    head = output_head(model)
    cut: Any = getattr(head, "tensor_cut", None)
    if isinstance(head, VocabularyEmbedding):  # in a pipeline, whose tied head has no separate module
        assert head.tensor_cut.projection is not None
        head.tensor_cut.projection.is_gathered = False
    elif not isinstance(head, ColumnLinear) or cut.is_gathered:
        return False
    losses = partial(vocab_parallel_cross_entropy, channel=channel, vocabulary=cut.split.extent)
    if hasattr(model, "use_token_losses"):  # a pipeline, or a user's model
        return bool(model.use_token_losses(losses))
    if takes_loss_function(model):
        use_token_losses(head, losses)
        use_loss_function(model, causal_loss(channel))
        return True
    return False


def _lines(model: nn.Module) -> list[str]:
    lines = [f"{name}: shape {full_shape(parameter)}" for name, parameter in model.named_parameters()]
    return [*lines, *(f"{name}: a buffer of shape {tuple(buffer.shape)}" for name, buffer in model.named_buffers())]


def _replicas(job: Job, model: nn.Module, layout: Layout, mesh: Mesh, device: torch.device) -> Channel | None:
    """Returns the ranks that have the same key/value heads as this one; None where no stage has heads on several ranks.

    Every rank of the job must call it: all of them make the groups, also those of a stage without attention.
    """
    mine = {
        tuple(heads.replicas(place) for place in range(heads.size))
        for _, heads in layout.heads.values()
        if heads.size > heads.key_value
    }
    gathered = gather_from_stages(job, model, device, sorted(mine), label="the key/value heads of the stages")
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
    return connect_lists(job, lists, "shared heads", device, comm.default_timeout())


def _spread(model: nn.Module, channel: Channel, device: torch.device) -> None:
    """Broadcasts the first tensor rank's values to the others: they may have been drawn from different seeds."""
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
        group = _COPIES if _has_copies(cut) else None
        cut_parameter(parameter, cut, first_names[id(parameter)], made.channel, group, data)
    made.counts = _counts(layout, place)


def _has_copies(cut: ParameterCut) -> bool:
    """Returns whether several ranks that share the layer have the same part of a parameter."""
    return any(high - low > 1 for low, high in map(cut.split.replicas, range(cut.split.size)))


def _counts(layout: Layout, place: int) -> dict[str, bool]:
    """Returns :attr:`CutModel.counts` of a rank, by its place among those that share the layers."""
    copied = next(filter(_has_copies, layout.parameters.values()), None)  # the others have the same ranks
    return {} if copied is None else {_COPIES: place == copied.split.replicas(place)[0]}


def _become_part(model: nn.Module, known: CutModel, place: int) -> None:
    """Turns a cut model, not sharded, into the part of the rank at ``place`` among those that share the layers.

    Its cut parameters are zeros until a checkpoint is loaded.
    """
    before, layout = known.channel.rank, known.layout
    by_name: Mapping[str, Any] = dict(model.named_parameters(remove_duplicate=False))
    for name, cut in layout.parameters.items():
        become_part(by_name[name], cut, place)
    known.counts = _counts(layout, place)
    for module in model.modules():
        linear = getattr(module, "tensor_cut", None)
        if isinstance(linear, CutLinear):
            low, high = linear.split.replicas(place)
            linear.replicas = known.connection.replicas if known.connection is not None and high - low > 1 else None
            set_features(module, linear)
    for name, (attention, heads) in layout.heads.items():
        (low, high), (first, last) = heads.of_query(before), heads.of_key_value(before)
        present = replace(attention, query=high - low, key_value=last - first)
        set_head_counts(model.get_submodule(name), present, heads, place)


BY_DEFAULT_BELOW = 300_000_000
"""Largest number of parameters of a model that is compared by default."""
_ROWS, _LENGTH = 2, 8
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-9}
_COARSE = 0.1  # for 16-bit types, whose sums are rounded at every rank


@dataclass
class ConsistencyCheck:
    """A model's outputs and gradients before the cut."""

    inputs: dict[str, Any]  # keyword arguments of its forward
    output: torch.Tensor  # the model's output
    gradients: dict[str, torch.Tensor]  # the gradients of parameters that stay whole, by name

    @classmethod
    def before(
        cls, model: nn.Module, layout: Layout, section: TensorParallel, device: torch.device
    ) -> ConsistencyCheck | None:
        """Runs the whole model.

        Returns None where it is too large, sharded, on another device, or its inputs are unknown.

        Raises:
            DeepSpeedConfigError: ``verify`` is set, and the whole model cannot be run.
        """
        if section.verify is False:
            return None
        why = _why_not(model, device, is_requested=bool(section.verify))
        inputs = None if why else inputs_of(model, layout.size if section.sequence_parallel_norms else 1)
        if inputs is None:
            _decline(section, why or f"what {type(model).__name__} takes as input is not known")
            return None
        if section.vocab_parallel_lm_head:
            inputs["labels"] = inputs["input_ids"]  # logits stay cut then, the loss does not
        cut = set(layout.parameters)
        whole = {n: p for n, p in model.named_parameters() if n not in cut and p.requires_grad}
        try:
            output, gradients = _output_and_gradients(model, inputs, whole)
        except Exception as error:  # of the model's own code, on all ranks alike
            given = ", ".join(inputs)
            _decline(section, f"{type(model).__name__} does not run on {given} alone ({type(error).__name__}: {error})")
            return None
        return cls(inputs, output, gradients)

    def after(self, model: nn.Module, channel: Channel) -> None:
        """Runs the cut model and compares. All ranks that share its layers must call it, and reach the same decision.

        Raises:
            DeepSpeedConfigError: The cut model computes something else.
        """
        by_name = dict(model.named_parameters())
        try:
            output, gradients = _output_and_gradients(
                model, self.inputs, {name: by_name[name] for name in self.gradients}
            )
        except (RuntimeError, ValueError, IndexError) as error:
            raise DeepSpeedConfigError(
                f"tensor_parallel.verify: the cut {type(model).__name__} cannot compute: {error}. A module keeps a "
                "size to itself that the cut has changed, or a layer must not be cut; see which by the traceback, and "
                'leave its layers whole with a layer_specs entry of partition_type "skip"'
            ) from error
        failure = _difference("its output", output, self.output, 0.0)
        # A gradient that is tiny beside the others (a bias of keys, which softmax cancels) is rounding error.
        typical = sorted(float(gradient.abs().max()) for gradient in self.gradients.values())
        least = 1e-3 * typical[len(typical) // 2] if typical else 0.0
        for name, expected in self.gradients.items():
            failure = failure or _difference(f"the gradient of {name!r}", gradients[name], expected, least)
        gathered = channel.transport.gather_small(
            torch.tensor([int(failure is not None)]), channel="call", label="the comparison of the cut model"
        )
        if bool(gathered.any()):
            found = failure or "another rank of the tensor group found a difference"
            raise DeepSpeedConfigError(
                f"tensor_parallel.verify: the cut {type(model).__name__} computes something else than the whole one: "
                f"{found}. The rules do not fit the model; write tensor_parallel.partition_config for it, with "
                'partition_type "skip" for the layers in question'
            )


def _decline(section: TensorParallel, why: str) -> None:
    """Logs that the cut model is not compared with the whole one; raises where ``verify`` requests it."""
    if section.verify:
        raise DeepSpeedConfigError(f"tensor_parallel.verify: {why}; leave the key out, or set it to false")
    log_dist(f"tensor_parallel.verify: the cut model is not compared with the whole one, as {why}")


def _why_not(model: nn.Module, device: torch.device, *, is_requested: bool) -> str:
    parameters = list(model.parameters())
    if any(isinstance(parameter, ShardedParameter) for parameter in parameters):
        return "it is sharded"
    numel = sum(map(full_numel, parameters))
    if not is_requested and numel > BY_DEFAULT_BELOW:
        return f"it has {numel:,} parameters (tensor_parallel.verify: true compares it all the same)"
    if {parameter.device.type for parameter in parameters} != {device.type}:
        return f"it is not on the device {device.type!r} yet"
    return ""


def inputs_of(model: nn.Module, multiple: int = 1) -> dict[str, Any] | None:
    """Returns a small input of a Transformers model, the same on all ranks; None where it is not known.

    The length of its sequences is a multiple of ``multiple``.
    """
    return small_inputs(model, _ROWS, -(-_LENGTH // multiple) * multiple)


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Runs the block without dropout and without compiled code; restores random states and modes.

    A compiled forward keeps autograd nodes of the parameters with the shapes that they had before the cut.
    """
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.random.fork_rng(), without_compiling():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _output_and_gradients(
    model: nn.Module, inputs: dict[str, Any], whole: dict[str, nn.Parameter]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Returns the model's output and the gradients of ``whole`` for a loss that depends on every element."""
    with _undisturbed(model), torch.enable_grad():
        result = model(**inputs)
        output = result if isinstance(result, torch.Tensor) else result[0]
        weights = torch.linspace(-1.0, 1.0, output.numel(), device=output.device).view(output.shape)
        loss = (output.float() * weights.cos()).sum()
        names = list(whole)
        found = torch.autograd.grad(loss, [whole[name] for name in names], allow_unused=True) if names else ()
        gradients = {n: g.detach().clone() for n, g in zip(names, found, strict=True) if g is not None}
    return output.detach().clone(), gradients


def _difference(what: str, found: torch.Tensor, expected: torch.Tensor, least: float) -> str | None:
    scale = max(float(expected.abs().max()), least)
    off = float((found.float() - expected.float()).abs().max())
    limit = _TOLERANCE.get(expected.dtype, _COARSE)
    if off <= limit * max(scale, 1e-6):
        return None
    return f"{what} is off by {off:.3g}, of values up to {scale:.3g}"
