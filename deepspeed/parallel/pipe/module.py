"""A model as a sequence of layers; each rank has those of its stage."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from deepspeed.accelerator import get_accelerator
from deepspeed.activation_checkpointing.checkpointing import checkpoint, non_reentrant_checkpoint
from deepspeed.axes import PIPE
from deepspeed.comm.job.job import Job, is_initialized, size_of
from deepspeed.comm.job.mesh import Mesh
from deepspeed.config.sections.pipeline import PipelineSection
from deepspeed.errors import DeepSpeedConfigError, NotYetSupportedError
from deepspeed.logging import log_dist
from deepspeed.models.anatomy import output_head
from deepspeed.models.configurations import counts_routers
from deepspeed.parallel.pipe import layer_files
from deepspeed.parallel.pipe.cut import LayerCost, best_cut
from deepspeed.parallel.pipe.partition import Method, chunk_bounds, costs_by_size, counted_costs, is_plan
from deepspeed.parallel.pipe.schedule import place_chunks
from deepspeed.parallel.pipe.spec import (
    Entry,
    LayerSpec,
    TiedLayerSpec,
    check_tie,
    checked,
    class_name,
    seeded,
    tied_places,
    trainable_numel,
)
from deepspeed.parallel.pipe.stage_layers import StageLayers
from deepspeed.parallel.pipe.tied import Tie, declare_ties, settle_ties
from deepspeed.parallel.pipe.topology import PipeDataParallelTopology, PipelineParallelGrid, ProcessTopology

DEFAULT_SCHEDULE = "1f1b"
_PLANNED_MICRO_BATCHES = 4  # per stage; the actual number is unknown when layers are cut


class PipelineModule(StageLayers):
    """Layers that run one after the other, each on one value, divided among stages. Every rank must make it alike.

    Layer i is the child ``str(i)`` on any stage, so names do not depend on the cut; tied layers are
    ``tied_modules.{key}``. Initial values do not depend on it either: every layer is built under its own seed.

    Args:
        layers: Modules, :class:`LayerSpec`, :class:`TiedLayerSpec` and functions. Each rank builds its stage's specs.
        num_stages: Stages; the other ranks are copies of the model.
        topology: How the ranks are laid out, in place of ``num_stages``.
        loss_fn: ``loss_fn(outputs, labels)`` gives the loss of a micro-batch, ``(loss, metrics)``, or, for a mean over
            all tokens of the update, ``(sum, count)`` or ``(sum, count, metrics)``; None: the last layer's output is
            that.
        seed_layers: Begin random numbers at ``base_seed + i`` when layer i is built, and at
            ``base_seed * micro-batch + i`` when it runs.
        seed_fn: Sets that seed; None: torch's own.
        base_seed: See ``seed_layers``.
        partition_method: How layers are divided, see :func:`~deepspeed.parallel.pipe.partition.chunk_bounds`.
        activation_checkpoint_interval: Layers that are recomputed together; 0: none are.
        activation_checkpoint_func: Runs a block that is to be recomputed; None: the non-reentrant one.
        checkpointable_layers: Class names: only blocks of such layers are recomputed. None: all with parameters.
        dynamic_shape: Not needed: shapes may always differ.
        schedule: Name of the schedule; None: the configuration's, or ``1f1b``.
        num_chunks: Chunks of layers per stage, for schedules with several; None: as the schedule has it.
        sample: ``(inputs, labels)`` of a micro-batch, of which only shapes and dtypes count: with it
            ``partition_method="plan"`` runs the layers without values and counts; without, they count by elements.

    Raises:
        DeepSpeedConfigError: The layers cannot be cut as requested, or the ranks do not make up the stages.
        RuntimeError: There is no process group yet.
    """

    is_pipeline = True
    _engine_class = "deepspeed.engine.pipeline.PipelineEngine"
    # Other stages may have expert layers, and all ranks must make the groups.
    _ds_features = ("deepspeed.parallel.pipe.feature", "deepspeed.parallel.expert.feature")
    holds_blocks = True  # each layer is a unit that ZeRO gathers at once
    stage_id: int  # this rank's stage
    parts: list[int]  # bounds of the chunks; with one chunk per stage those of the stages

    def __init__(
        self,
        layers: Iterable[Any],
        num_stages: int | None = None,
        topology: ProcessTopology | None = None,
        loss_fn: Callable[..., Any] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], Any] | None = None,
        base_seed: int = 1234,
        partition_method: Method = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] | None = None,
        checkpointable_layers: Sequence[str] | None = None,
        dynamic_shape: bool = False,
        *,
        schedule: str | None = None,
        num_chunks: int | None = None,
        sample: tuple[Any, Any] | None = None,
    ) -> None:
        if not is_initialized():
            raise RuntimeError("PipelineModule: there is no process group yet; call deepspeed.init_distributed() first")
        specs = checked(list(layers))
        super().__init__(
            list(map(class_name, specs)),
            loss_fn,
            seed_layers=seed_layers,
            seed_fn=seed_fn,
            base_seed=base_seed,
            activation_checkpoint_interval=activation_checkpoint_interval,
            activation_checkpoint_func=activation_checkpoint_func or non_reentrant_checkpoint,
            checkpointable_layers=checkpointable_layers,
        )
        self.dynamic_shape = dynamic_shape
        self._layer_specs = specs
        self._num_layers = len(specs)
        self._partition_method = partition_method
        self._topo = _topology(num_stages, topology)
        self._grid = PipelineParallelGrid(self._topo)
        self.mesh: Mesh = self._grid.mesh
        self.num_stages, self.stage_id = self.mesh.size(PIPE), self._grid.stage_id
        self.global_rank, self.world_size = self._grid.global_rank, self._grid.world_size
        self._counts: list[int] | None = None
        self._sample = sample
        self._layer_costs: tuple[list[LayerCost], LayerCost | None] | None = None
        self._seed = int(torch.randint(2**31, ()))  # one draw, regardless of the cut
        self.chosen_schedule = schedule
        self.schedule, self.num_chunks = schedule or DEFAULT_SCHEDULE, num_chunks
        self._place(self.schedule, self.num_chunks)

    @classmethod
    def from_transformers(
        cls, model_or_config: Any, num_stages: int | None = None, *, token_mean: bool = False, **kwargs: Any
    ) -> PipelineModule:
        """Returns a pipeline of a decoder-only Transformers model, or its configuration.

        With ``token_mean`` the loss of an update is the mean over all its tokens, whatever the micro-batches; else the
        mean of the means of its micro-batches. The other arguments are those of the class.

        Raises:
            DeepSpeedConfigError: ``token_mean`` beside a ``loss_fn``.
        """
        from deepspeed.parallel.pipe.transformers_models import layers_of, next_token_loss, usual_sample

        if token_mean and kwargs.get("loss_fn") is not None:
            raise DeepSpeedConfigError(
                "from_transformers(token_mean=True, loss_fn=...): token_mean is an option of the loss of "
                "from_transformers; leave it out, and let loss_fn return (sum, count)"
            )
        kwargs.setdefault(
            "loss_fn", functools.partial(next_token_loss, token_mean=True) if token_mean else next_token_loss
        )
        if is_plan(kwargs.get("partition_method")):
            kwargs.setdefault("sample", usual_sample(model_or_config))
        return cls(layers_of(model_or_config), num_stages=num_stages, **kwargs)

    # -- cutting and building ----------------------------------------------------------------------------------------

    @property
    def _job(self) -> Job:
        return Job.adopt()

    def settle(self, device: torch.device) -> None:
        """Makes tied weights equal on all their stages; called by ``initialize``, on every rank."""
        settle_ties(self._job, self.tied_comms, device)

    @property
    def is_part_of_model(self) -> bool:
        """Returns whether other ranks hold other layers; all that is trained may then lie there."""
        return self.num_stages > 1

    @property
    def transformers_model(self) -> Any:
        """The Transformers model that the layers are from, with values or without; None: they are from none."""
        from deepspeed.parallel.pipe.transformers_models import whole_model_of

        return whole_model_of(self._layer_specs)

    def names_in_transformers(self) -> dict[str, str]:
        """Maps name prefixes here to those in the Transformers model; empty if the layers are from none."""
        from deepspeed.parallel.pipe.transformers_models import transformers_names

        return {} if self.transformers_model is None else transformers_names(self._layer_specs)

    def share_loss(self, *, own_share: bool) -> None:
        """Adapts the loss of :meth:`from_transformers` to sequence parallelism; other losses do not change.

        With ``own_share`` a rank back-propagates its share of it; see ``deepspeed.sequence.mean_loss``.

        Raises:
            NotYetSupportedError: Routers count in the loss.
        """
        from deepspeed.parallel.pipe import transformers_models

        given, options = self._own_loss()
        if given is not transformers_models.next_token_loss:
            return
        if counts_routers(self.transformers_model.config):
            raise NotYetSupportedError(
                "from_transformers with sequence_parallel_size and output_router_logits: the balance of routers would "
                "be that of each rank's own tokens; set output_router_logits to False, or give a loss_fn"
            )
        self.loss_fn = functools.partial(transformers_models.next_token_loss_of_parts, own_share=own_share, **options)

    def use_token_losses(self, losses: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> bool:
        """Makes the loss accept vocabulary-parallel logits; returns False if the loss function does not allow it.

        It is for the loss of :meth:`from_transformers`, or a ``loss_fn`` with a keyword ``losses``. Other losses do not
        change. ``losses`` maps logits ``[tokens, vocabulary of this rank]`` and labels ``[tokens]`` to ``[tokens]``.
        """
        adapted, options = self._own_loss()
        if adapted is None and self.loss_fn is not None:
            with contextlib.suppress(ValueError):  # of a built-in function
                adapted = self.loss_fn if "losses" in inspect.signature(self.loss_fn).parameters else None
        if adapted is not None:
            self.loss_fn = functools.partial(adapted, **{**options, "losses": losses})
        return adapted is not None

    def _own_loss(self) -> tuple[Callable[..., Any] | None, dict[str, Any]]:
        """Returns the loss of :meth:`from_transformers` and its options; None where the program gave another."""
        from deepspeed.parallel.pipe.transformers_models import next_token_loss, next_token_loss_of_parts

        is_partial = isinstance(self.loss_fn, functools.partial)
        given: Any = self.loss_fn.func if is_partial else self.loss_fn  # type: ignore[union-attr]
        options = dict(self.loss_fn.keywords) if is_partial else {}  # type: ignore[union-attr]
        return (given if given in (next_token_loss, next_token_loss_of_parts) else None), options

    def get_output_embeddings(self) -> nn.Module | None:
        """Returns the layer with the weight of the head; None where this stage has none, or it is not known.

        A last layer that is from no Transformers model names it by a method of the same name.
        """
        last = self._num_layers - 1
        if self.stage_owner(last) != self.stage_id:
            return None
        layer: Any = self.forward_funcs[self.fwd_map[str(last)]]
        if self.transformers_model is None:
            return output_head(layer)
        return (layer.args[0] if isinstance(layer, functools.partial) else layer).part

    def run_of_blocks(self) -> range:
        """Returns the numbers of the repeated blocks: the longest run of layers of one class, on whatever stages."""
        runs = [(len(list(run)), name) for name, run in itertools.groupby(self._names)]
        ends = list(itertools.accumulate(length for length, _ in runs))
        length, place = max((length, -place) for place, (length, _) in enumerate(runs))
        return range(ends[-place] - length, ends[-place])

    def take_pipeline_config(self, section: PipelineSection) -> None:
        """Applies the configuration; the schedule only if the program chose none. Layers may be built again.

        Raises:
            DeepSpeedConfigError: The program has chosen another schedule.
        """
        if section.activation_checkpoint_interval > 0:
            self.activation_checkpoint_interval = section.activation_checkpoint_interval
        if section.use_reentrant:
            self.activation_checkpoint_func = checkpoint
        name, num_chunks = section.schedule or self.schedule, section.num_chunks
        if (name, num_chunks or self.num_chunks) == (self.schedule, self.num_chunks):
            return
        if self.chosen_schedule is not None:
            raise DeepSpeedConfigError(
                f"pipeline.schedule {name!r} with pipeline.num_chunks {num_chunks}, but the PipelineModule was built "
                f"with schedule={self.chosen_schedule!r}, num_chunks={self.num_chunks}; leave one of them out"
            )
        if self._stage_of != self._stages_of_chunks(name, num_chunks):
            log_dist(f"pipeline.schedule {name!r} divides the layers differently from the module: they are built again")
            self._place(name, num_chunks)
        self.schedule, self.num_chunks = name, num_chunks

    def _stages_of_chunks(self, schedule: str, num_chunks: int | None) -> tuple[int, ...]:
        try:
            return place_chunks(schedule, self.num_stages, num_chunks)
        except ValueError as error:
            raise DeepSpeedConfigError(f"PipelineModule: {error}") from None

    def _place(self, schedule: str, num_chunks: int | None) -> None:
        self._stage_of = self._stages_of_chunks(schedule, num_chunks)
        self.chunks = [chunk for chunk, stage in enumerate(self._stage_of) if stage == self.stage_id]
        self._placing = (schedule, num_chunks)
        self._partition_layers(method=self._partition_method)
        first = self.chunks[0]
        parts = getattr(self, "parts", None)
        if parts is None:
            raise DeepSpeedConfigError(
                f"{type(self).__name__}._partition_layers: expected it to set self.parts, found none; set the bounds "
                "of all stages there, as in [0, 3, 8] for two stages of 3 and 5 layers"
            )
        bounds = chunk_bounds(list(parts), [], self._names, len(self._stage_of))
        if (self._local_start, self._local_stop) != tuple(bounds[first : first + 2]):
            raise DeepSpeedConfigError(
                f"{type(self).__name__}._partition_layers: expected self._set_bounds to get the layers of this stage, "
                f"{self.parts[first]} up to {self.parts[first + 1]} by self.parts {self.parts}, found "
                f"{self._local_start} up to {self._local_stop}; pass it the bounds in self.parts"
            )
        self._build()
        log_dist(self._table())

    def _partition_layers(self, method: Method = "parameters") -> None:
        """Sets ``parts``, and the bounds of this stage. A class that cuts the layers itself overrides it.

        An override sets ``self.parts``, one bound more than there are stages and equal on all ranks, and calls
        ``self._set_bounds(start, stop)``. ``method`` is the constructor's ``partition_method``.
        """
        if is_plan(method) and self._num_layers >= len(self._stage_of):
            method = self._planned(*self._placing)
        self.parts = chunk_bounds(method, self._numels(), self._names, len(self._stage_of))
        self._set_bounds(self.parts[self.chunks[0]], self.parts[self.chunks[0] + 1])

    def _set_bounds(self, start: int, stop: int) -> None:
        """Sets the first layer of this stage, and the first behind it."""
        self._local_start, self._local_stop = start, stop

    def _numels(self) -> list[int]:
        method = self._partition_method
        if not isinstance(method, str) or method.strip().lower() != "parameters":
            return [0] * self._num_layers
        if self._counts is None:
            self._counts = [trainable_numel(entry) for entry in self._layer_specs]
        return self._counts

    def _planned(self, schedule: str, num_chunks: int | None) -> list[int]:
        """Returns the cut for ``plan``: the one with the least step time whose memory fits."""
        if self._layer_costs is None:
            if self._sample is None:
                self._layer_costs = costs_by_size(self._layer_specs, with_loss=self.loss_fn is not None)
            else:
                self._layer_costs = counted_costs(self._layer_specs, self.loss_fn, self._sample)
        layers, loss = self._layer_costs
        accelerator = get_accelerator()
        limit = None if accelerator.computes_in_host_memory else accelerator.total_memory()
        chosen = (layers, schedule, self.num_stages, _PLANNED_MICRO_BATCHES * self.num_stages, num_chunks)
        try:
            return list(best_cut(*chosen, loss=loss, limit=limit).bounds)
        except ValueError as error:
            log_dist(f"partition_method='plan': {error}", level=logging.WARNING)
            return list(best_cut(*chosen, loss=loss).bounds)

    def _build(self) -> None:
        for name in [name for name, _ in self.named_children() if name != "loss_fn"]:  # loss_fn may be a module too
            delattr(self, name)
        self.forward_funcs = []
        self.fwd_map: dict[str, int] = {}  # name of a layer to its place in ``forward_funcs``
        self.tied_modules = nn.ModuleDict()  # the module of each key that this stage has
        self.tied_weight_attrs: dict[str, list[str]] = {}
        self._ranges, self._numbers = {}, []
        for chunk in self.chunks:
            first = len(self.forward_funcs)
            for number in range(self.parts[chunk], self.parts[chunk + 1]):
                self._numbers.append(number)
                self._add(number, self._layer_specs[number])
            self._ranges[chunk] = range(first, len(self.forward_funcs))
        owners = {
            key: sorted({self.stage_owner(number) for number in numbers})
            for key, numbers in tied_places(self._layer_specs).items()
        }
        self.tied_comms: dict[str, Tie] = declare_ties(self._job, self.mesh, owners, self.tied_modules)

    def _add(self, number: int, entry: Entry) -> None:
        name = str(number)
        if isinstance(entry, TiedLayerSpec):
            if entry.key not in self.tied_modules:
                # One seed per key, so that untied parts are equal too.
                places = tied_places(self._layer_specs)[entry.key]
                self.tied_modules[entry.key] = self._built(places[0], entry)
                self.tied_weight_attrs[entry.key] = entry.tied_weight_attr
            module = self.tied_modules[entry.key]
            check_tie(entry, module)
            forward: Any = module if entry.forward_fn is None else functools.partial(entry.forward_fn, module)
        elif isinstance(entry, LayerSpec):
            forward = self._built(number, entry)
            self.add_module(name, forward)
        else:
            forward = entry
            if isinstance(entry, nn.Module):
                self.add_module(name, entry)
        self.fwd_map[name] = len(self.forward_funcs)
        self.forward_funcs.append(forward)

    def _built(self, number: int, spec: LayerSpec) -> nn.Module:
        if self.seed_layers:
            with seeded(self.base_seed + number, self.seed_fn):
                return spec.build()
        with seeded(self._seed + number, None):
            return spec.build()

    def _table(self) -> str:
        layers = "1 layer" if self._num_layers == 1 else f"{self._num_layers} layers"
        lines = [f"pipeline of {layers} on {self.num_stages} stage(s), {self.schedule}:"]
        for chunk, stage in enumerate(self._stage_of):
            first, stop = self.parts[chunk], self.parts[chunk + 1]
            runs: list[list[Any]] = []
            for name in self._names[first:stop]:
                if runs and runs[-1][0] == name:
                    runs[-1][1] += 1
                else:
                    runs.append([name, 1])
            shown = ", ".join(name if count == 1 else f"{count} x {name}" for name, count in runs)
            which = f"layer {first}" if stop - first == 1 else f"layers {first} to {stop - 1}"
            lines.append(f"  stage {stage}: {which}: {shown}")
        return "\n".join(lines)

    # -- queries -----------------------------------------------------------------------------------------------------

    def partitions(self) -> list[int]:
        """Bounds of the chunks in the row of layers."""
        return self.parts

    def stage_owner(self, layer_idx: int) -> int:
        """Returns the stage that has a layer.

        Raises:
            ValueError: There is no such layer.
        """
        for chunk, stage in enumerate(self._stage_of):
            if self.parts[chunk] <= layer_idx < self.parts[chunk + 1]:
                return stage
        raise ValueError(f"stage_owner({layer_idx}): the layers are 0 to {self._num_layers - 1}")

    def tied_layer_names(self) -> dict[int, str]:
        """Returns the prefixes of the names of tied layers, by layer number; the prefix of any other layer i is i."""
        places = tied_places(self._layer_specs)
        return {number: f"tied_modules.{key}." for key, numbers in places.items() for number in numbers}

    def topology(self) -> ProcessTopology:
        """Returns how the ranks are laid out."""
        return self._topo

    def mpu(self) -> PipelineParallelGrid:
        """Returns where this rank stands."""
        return self._grid

    def num_pipeline_stages(self) -> int:
        """Returns the number of pipeline stages."""
        return self.num_stages

    def get_tied_weights_and_groups(self) -> list[tuple[nn.Parameter, Any]]:
        """Returns each tied weight of this rank with the torch process group of the stages that have it."""
        return [pair for tie in self.tied_comms.values() for pair in tie.weights_and_groups(self._job)]

    def allreduce_tied_weight_gradients(self) -> None:
        """Does nothing: gradients of tied weights are summed over their stages as part of the update."""

    # -- files -------------------------------------------------------------------------------------------------------

    ckpt_prefix = layer_files.prefix
    ckpt_layer_path = layer_files.layer_path
    ckpt_layer_path_list = layer_files.layer_path_list
    load_state_dir = layer_files.load_state_dir
    save_state_dict = layer_files.save_state_dict


def _topology(num_stages: int | None, topology: ProcessTopology | None) -> ProcessTopology:
    if topology is not None:
        if num_stages is not None and num_stages != topology.get_dim(PIPE):
            raise DeepSpeedConfigError(
                f"PipelineModule(num_stages={num_stages}): the topology has {topology.get_dim(PIPE)} stages; give one "
                "of them"
            )
        return topology
    if num_stages is None:
        raise RuntimeError("PipelineModule: give num_stages or topology")
    world = size_of()
    if num_stages < 1 or world % num_stages:
        raise RuntimeError(
            f"PipelineModule(num_stages={num_stages}): the job has {world} rank(s), which is not a multiple of it; "
            "start a multiple, or choose a divisor"
        )
    return PipeDataParallelTopology(num_stages, world // num_stages)


class DualPipeVModule(PipelineModule):
    """Rank r of p holds the chunks r and 2 p - 1 - r, so the first one has the beginning and the end of the model.

    Arguments are those of :class:`~deepspeed.parallel.pipe.module.PipelineModule`.

    Raises:
        DeepSpeedConfigError: Another schedule is given.
    """

    def __init__(self, layers: Iterable[Any], *args: Any, **kwargs: Any) -> None:
        if kwargs.setdefault("schedule", "dualpipev") != "dualpipev":
            raise DeepSpeedConfigError(
                f"DualPipeVModule(schedule={kwargs['schedule']!r}): its schedule is dualpipev; use PipelineModule for "
                "others"
            )
        super().__init__(layers, *args, **kwargs)

    @property
    def phase_bounds(self) -> list[tuple[int, int]]:
        """First and last layer, exclusive, of each of this rank's two chunks."""
        return [(self.parts[chunk], self.parts[chunk + 1]) for chunk in self.chunks]

    @property
    def phase_funcs(self) -> list[list[Callable[..., Any]]]:
        """The layers of each of this rank's two chunks."""
        return [[self.forward_funcs[place] for place in self._ranges[chunk]] for chunk in self.chunks]

    @property
    def active_phase(self) -> int:
        """Which of the two chunks ``forward`` runs; 0 by default."""
        return 0 if self.active_chunk is None else self.chunks.index(self.active_chunk)

    def activate_phase(self, phase: int) -> None:
        """Makes ``forward`` run one of the two chunks."""
        self.active_chunk = self.chunks[phase]
