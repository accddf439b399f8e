"""An engine's calls for checkpoints; the work is done by :mod:`deepspeed.checkpoint`."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from logging import WARNING
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from deepspeed.checkpoint.checkpoint_engine import CheckpointEngine, TorchCheckpointEngine
from deepspeed.checkpoint.export import (
    GATHERED_BYTES,
    ExportOptions,
    full_state_dict,
    iter_weights,
    weight_infos,
    write_weights,
)
from deepspeed.checkpoint.load import LoadOptions, LoadResult, load, load_by, load_state_dict
from deepspeed.checkpoint.run_state import RunState
from deepspeed.checkpoint.save import SaveOptions, Saver
from deepspeed.checkpoint.weight_delta import SentWeights, check_compression, iter_delta
from deepspeed.checkpoint.weight_formats import FORMATS, WeightInfo, products_of
from deepspeed.checkpoint.weights_file import parse_size
from deepspeed.engine.batches import Batches
from deepspeed.errors import CheckpointError, DeepSpeedConfigError
from deepspeed.logging import log_dist, log_dist_once
from deepspeed.models.adapters import adapter_names, merge_adapters
from deepspeed.models.anatomy import output_head, unwrapped
from deepspeed.models.stored import to_files
from deepspeed.models.tensor_rules import TensorRule, rename_beginnings, renamings

if TYPE_CHECKING:
    from deepspeed.config.sections.root import Root
    from deepspeed.engine.parts import EngineParts
    from deepspeed.engine.progress import ProgressLog
    from deepspeed.zero.runtime import ZeroRuntime


class EngineCheckpoints:
    """Saving and loading of one engine."""

    def __init__(
        self,
        parts: EngineParts,
        progress: ProgressLog,
        *,
        run_state: Callable[[], RunState],
        resume: Callable[[LoadResult], None],
        batches: Batches,
    ) -> None:
        self._parts = parts
        self._progress = progress
        self._root: Root = parts.parsed.root
        self._runtime: ZeroRuntime = parts.runtime
        self._run_state = run_state
        self._resume = resume
        self._batches = batches
        self._made_saver: Saver | None = None
        self._own_engine: CheckpointEngine | None = None
        self.used: list[Path] = []  # folders that were saved to or loaded from, absolute, the last one last
        self._writes_for_all = False
        self._sent = SentWeights()
        # Another one for each engine, since a receiver may have weights of an engine that is gone.
        own = torch.tensor([secrets.randbits(48)])
        runs = self._runtime.groups.job.gather_small(own, channel="objects", label="the number of the run")
        self._run = f"{int(runs[0]):012x}"
        self._loads = self._edits = 0  # how often weights were loaded, or found changed without an update

    def save_checkpoint(
        self,
        save_dir: str | PathLike[str],
        tag: Any = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        *,
        async_save: bool | None = None,
    ) -> bool:
        """Saves everything that a later run needs. Every rank must call it; all return together.

        The checkpoint becomes visible at once, when all of it is on the disk; until then the former ones stay as they
        were.

        Args:
            save_dir: Folder of checkpoints; made if it is missing.
            tag: Name of this one; ``global_step<N>`` by default.
            client_state: The caller's own state; rank 0's is saved, and ``load_checkpoint`` returns it.
            save_latest: Let the file ``latest`` name this one.
            exclude_frozen_parameters: Leave parameters without gradient out.
            async_save: Return when the state is copied, and write beside training; the next save waits. None is the
                configuration's ``checkpoint.async_save``.

        Returns:
            True.

        Raises:
            CheckpointError: Some rank could not write; the same on all ranks.
            DeepSpeedConfigError: ``save_dir`` is no path, or ``client_state`` no dict.
        """
        _refuse_no_path(f"save_checkpoint(save_dir={save_dir!r})", save_dir)
        if not isinstance(client_state, (Mapping, type(None))):
            raise DeepSpeedConfigError(
                f"save_checkpoint(client_state=...): expected a dict, found {type(client_state).__name__}; put the "
                "value under a key of a dict"
            )
        self._runtime.leave_backward("save_checkpoint")
        if self._batches.since_update:
            log_dist_once(
                "save_checkpoint in the middle of gradient accumulation: gradients are not saved, so a resumed run "
                "lacks those of the micro-batches since the last update and starts its accumulation over"
            )
        if self._parts.training_group.is_divided and not self._writes_for_all:
            saver = self._saver
            _ = saver.exchange  # which all ranks must make
            return self._by_one_group(
                "save_checkpoint",
                lambda: self.save_checkpoint(
                    save_dir, tag, client_state, save_latest, exclude_frozen_parameters, async_save=async_save
                ),
            )
        run_state = self._run_state()
        settings = self._root.checkpoint
        by_default = settings.async_save or (settings.writer is not None and settings.writer.decoupled)
        options = SaveOptions(
            root=Path(save_dir),
            tag=f"global_step{run_state.counters['global_steps']}" if tag is None else tag,
            client_state=dict(client_state or {}),
            save_latest=save_latest,
            exclude_frozen=exclude_frozen_parameters,
            in_background=by_default if async_save is None else async_save,
            engine=self._own_engine,
        )
        with self._progress.during("save", step=run_state.counters["global_steps"], tag=options.tag):
            self._saver.save(run_state, options)
        self._note_use(options.root)
        return True

    def load_checkpoint(
        self,
        load_dir: str | PathLike[str],
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
        *,
        must_exist: bool = False,
        allow_pickled_objects: bool = False,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Loads what any number of ranks saved at any stage. Every rank must call it.

        The position in the data of the engine's own loader, and of a ``StatefulDataLoader`` of torchdata, is restored
        on any number of ranks, if its sampler is a ``DistributedSampler`` or derived from one: the samples that are
        left of an epoch come in the original order. Random states, and the position of a loader with
        another sampler or over a stream, are restored only where as many ranks save and load. Buffers become those of
        rank 0 on every rank, also where ranks had values of their own (running statistics of batch norm), as they do in
        ``initialize``. Gradients of micro-batches since the last update are dropped, and accumulation begins again.

        Args:
            load_dir: Folder of checkpoints.
            tag: Name of one; the one that ``latest`` names by default.
            load_module_strict: A parameter or buffer that only one side has is an error.
            load_optimizer_states: Restore optimizer states and hyperparameters; otherwise the optimizer keeps its own.
            load_lr_scheduler_states: Restore the schedule.
            load_module_only: Restore weights and buffers, and no counters either.
            custom_load_fn: Called as ``custom_load_fn(src=state_dict, dst=module)`` with full parameters, to load the
                weights instead of by name.
            must_exist: A folder without any checkpoint is an error.
            allow_pickled_objects: Also restore objects that were saved apart because restoring them runs code. Only
                for files that you trust.

        Returns:
            ``(folder of the checkpoint, client state)``; ``(None, None)`` where there is no checkpoint at all.

        Raises:
            CheckpointError: The checkpoint is missing, damaged or does not fit; the same on all ranks, and nothing
                was changed.
            DeepSpeedConfigError: ``load_dir`` is no path.
        """
        _refuse_no_path(f"load_checkpoint(load_dir={load_dir!r})", load_dir)
        self._runtime.leave_backward("load_checkpoint")
        self._saver.wait()
        self._runtime.refuse_offloaded("load_checkpoint")
        self._runtime.refuse_open_blocks("load_checkpoint")
        run_state = self._settled_run_state()
        self._runtime.take_unfrozen()  # so that their masters and states are there to be filled
        options = LoadOptions(
            root=Path(load_dir),
            tag=None if tag is None else str(tag),
            strict=load_module_strict,
            optimizer_states=load_optimizer_states,
            lr_scheduler_states=load_lr_scheduler_states,
            module_only=load_module_only,
            custom_load_fn=custom_load_fn,
            must_exist=must_exist,
            trust_objects=allow_pickled_objects,
            engine=self._own_engine,
        )
        loaded = load(run_state, options, self._saver.exchange)
        if loaded is None:
            return None, None
        self._note_use(options.root)
        self._loads += 1
        self._resume(loaded)
        return str(loaded.folder), loaded.client_state

    def _note_use(self, folder: Path) -> None:
        self.used = [*(known for known in self.used if known != folder.absolute()), folder.absolute()]

    def close(self) -> None:
        """Waits for a save in the background and closes the channel of checkpoints."""
        self._saver.close()
        if self._own_engine is not None:
            self._own_engine.cleanup()

    @property
    def engine(self) -> CheckpointEngine:
        """The program's own checkpoint engine; torch's files where it gave none."""
        return TorchCheckpointEngine() if self._own_engine is None else self._own_engine

    @engine.setter
    def engine(self, engine: CheckpointEngine | None) -> None:
        if engine is not None and not isinstance(engine, CheckpointEngine):
            raise DeepSpeedConfigError(
                f"engine.checkpoint_engine: expected an object of a class derived from CheckpointEngine, found "
                f"{type(engine).__name__}; derive it from deepspeed.runtime.checkpoint_engine.CheckpointEngine"
            )
        if engine is not None and self._root.checkpoint.keep_last is not None:
            raise DeepSpeedConfigError(
                f"checkpoint.keep_last={self._root.checkpoint.keep_last}: expected null beside "
                f"engine.checkpoint_engine, since only {type(engine).__name__} can remove what it stored; leave the "
                "key out"
            )
        self._own_engine = engine

    def wait_for_checkpoint(self) -> None:
        """Waits until a save in the background is on the disk. Every rank should call it.

        Raises:
            CheckpointError: It failed.
        """
        self._saver.wait()

    # -- weights for other programs ------------------------------------------------------------------------------------

    def save_16bit_model(
        self,
        save_dir: str | PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
        *,
        max_shard_size: int | str | None = None,
    ) -> bool:
        """Writes the full model in its compute dtype, for programs that load a state dict. Every rank must call it.

        Args:
            save_dir: Folder; made if it is not there.
            save_filename: A name ending in ``.safetensors`` gives that format, any other a torch file.
            exclude_frozen_parameters: Leave parameters without gradient out.
            max_shard_size: Largest file, in bytes or as a text such as ``5GB``; then there may be several with an
                index. None is one file.

        Returns:
            False, and nothing is written, at stage 3 without
            ``zero_optimization.stage3_gather_16bit_weights_on_model_save``.

        Raises:
            CheckpointError: Rank 0 could not write; the same on all ranks.
            DeepSpeedConfigError: ``save_dir`` is no path.
        """
        _refuse_no_path(f"save_16bit_model(save_dir={save_dir!r})", save_dir)
        if (
            self._parts.placement.shard_params
            and not self._root.zero_optimization.stage3_gather_16bit_weights_on_model_save
        ):
            log_dist(
                "save_16bit_model: nothing was saved, because the parameters are sharded and "
                "zero_optimization.stage3_gather_16bit_weights_on_model_save is false; set it to true",
                level=WARNING,
            )
            return False
        if self._parts.training_group.is_divided and not self._writes_for_all:
            _ = self._saver.exchange  # which all ranks must make
            return self._by_one_group(
                "save_16bit_model",
                lambda: self.save_16bit_model(
                    save_dir, save_filename, exclude_frozen_parameters, max_shard_size=max_shard_size
                ),
            )
        self._runtime.leave_backward("save_16bit_model")
        self._runtime.refuse_offloaded("save_16bit_model", "lp_params")
        run_state = self._settled_run_state()
        limit = None if max_shard_size is None else parse_size(max_shard_size)
        write_weights(
            run_state,
            self._saver.exchange,
            Path(save_dir),
            save_filename,
            exclude_frozen=exclude_frozen_parameters,
            limit=limit,
        )
        return True

    def export_weights(
        self,
        dtype: torch.dtype | str | None = None,
        *,
        ranks: Literal["all", 0] = 0,
        adapters: Literal["only", "merged"] | None = None,
        names: Callable[[str], str | None] | Literal["checkpoint"] | None = None,
        exclude_frozen_parameters: bool = False,
        bucket_bytes: int = GATHERED_BYTES,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Streams the full weights by name, for an inference server. Every rank must go through all of it.

        Besides its own part a rank never holds more than ``bucket_bytes`` of them, or one tensor, and the copy that it
        yields. Works at every stage, with tensor and expert parallelism; the names are those of the model. A pipeline's
        layers have the names of its checkpoints.

        Args:
            dtype: The dtype of floating parameters; None: the compute dtype. Or a name, for the weights of linear
                layers but the head and for stacks of experts: ``"float8_block128"`` (blocks of 128 x 128, after each
                weight its ``weight_scale_inv``) or ``"int8"`` (rows, with ``weight_scale``).
            ranks: The ranks that get the weights: rank 0, or all, with the same bits in the same order.
            adapters: ``"only"`` leaves out all but PEFT's adapters, which get the names that PEFT saves. ``"merged"``
                gives the weights of the base model under its names, with the adapters merged as PEFT does, whose
                parameters here do not change.
            names: Returns the name to yield; None leaves a tensor out. The same on all ranks. Or ``"checkpoint"``: the
                names, shapes and values that Transformers' ``save_pretrained`` writes, experts one by one.
            exclude_frozen_parameters: Leave parameters without gradient out (the base under an adapter).
            bucket_bytes: Most bytes gathered at once; a larger tensor is gathered alone. 1 gathers one at a time.

        Yields:
            ``(name, tensor)``, where the tensor is a copy that belongs to the caller; a tied parameter comes once, and
            saved buffers come last. With ``ranks=0`` nothing on the other ranks.

        Raises:
            DeepSpeedConfigError: An argument has another value, or does not fit the model; or a format of eight bits
                in a pipeline.
        """
        form = self._export_settings(dtype, ranks, adapters, names, exclude_frozen_parameters)
        self._runtime.leave_backward("export_weights")
        self._runtime.refuse_offloaded("export_weights", "lp_params")
        yield from iter_weights(
            self._settled_run_state(),
            self._saver.exchange,
            form,
            everywhere=ranks == "all",
            gathered_bytes=bucket_bytes,
        )

    def weight_metadata(
        self,
        dtype: torch.dtype | str | None = None,
        *,
        ranks: Literal["all", 0] = 0,
        adapters: Literal["only", "merged"] | None = None,
        names: Callable[[str], str | None] | Literal["checkpoint"] | None = None,
        exclude_frozen_parameters: bool = False,
    ) -> list[WeightInfo]:
        """Returns name, dtype, shape and bytes of what :meth:`export_weights` yields, in its order, without weights.

        The arguments are those of :meth:`export_weights`. Communicates only where ranks hold different parts of the
        model (pipelines, tensor and expert parallelism); every rank must call it then.

        Raises:
            DeepSpeedConfigError: As :meth:`export_weights`.
        """
        form = self._export_settings(dtype, ranks, adapters, names, exclude_frozen_parameters)
        return weight_infos(self._settled_run_state(), self._saver.exchange, form)

    @property
    def weight_version(self) -> str:
        """The version of the weights; equal on all ranks."""
        return f"{self._run}.{self._loads}.{self._batches.global_steps}.{self._edits}"

    def export_delta(
        self, since: str | None = None, *, compression: Literal["zlib", "zstd"] = "zlib"
    ) -> Iterator[bytes]:
        """Streams what changed in the weights, for ``deepspeed.rollout.apply_delta``. Every rank must go through it.

        Each rank compares its own parts with those of the last export; only parameters that changed are gathered, and
        only their changed blocks of 16 KiB sent. Names and values are those of :meth:`export_weights` without
        arguments. The engine keeps fingerprints of what it sent last, a thousandth of the weights.

        Args:
            since: The version that the receiver has; rank 0's counts. All weights are sent for None, and for any
                version but that of the last export to its end, so also after a load or on other ranks.
            compression: ``"zlib"``, or ``"zstd"`` with the package ``zstandard`` (the extra ``zstd``).

        Yields:
            On rank 0 the pieces, at most about 64 MiB or one tensor each; nothing on the other ranks.

        Raises:
            DeepSpeedConfigError: An unknown compression, or one whose package is missing.
        """
        check_compression(compression)
        options = self._export_settings(None, 0, None, None, False)
        self._runtime.leave_backward("export_delta")
        self._runtime.refuse_offloaded("export_delta", "lp_params")

        def next_version(is_changed: bool) -> str:
            if is_changed and self.weight_version == before:
                self._edits += 1
            return self.weight_version

        before = self._sent.version
        yield from iter_delta(
            self._settled_run_state(),
            self._saver.exchange,
            options,
            self._sent,
            since=since,
            next_version=next_version,
            compression=compression,
        )

    def _export_settings(
        self, dtype: Any, ranks: Any, adapters: Any, names: Any, exclude_frozen: bool
    ) -> ExportOptions:
        """Returns what ``iter_weights`` and ``weight_infos`` need; raises for values that they do not know."""
        model: Any = self._parts.model
        is_format, has_stages = isinstance(dtype, str), bool(getattr(model, "is_pipeline", False))
        for name, value, is_known, instead in (
            ("dtype", dtype, not is_format or dtype in FORMATS, f"a torch.dtype, None or {' or '.join(FORMATS)}"),
            ("dtype", dtype, not (is_format and has_stages), "a torch.dtype or None in a pipeline"),
            ("ranks", ranks, ranks == "all" or (ranks == 0 and ranks is not False), '0 or "all"'),
            ("adapters", adapters, adapters in (None, "only", "merged"), 'None, "only" or "merged"'),
            (
                "names",
                names,
                names in (None, "checkpoint") or callable(names),
                'None, "checkpoint" or a callable from a name to a name',
            ),
        ):
            if not is_known:
                raise DeepSpeedConfigError(f"export_weights({name}={value!r}): expected {instead}; pass one of them")
        levels: list[Callable[[Collection[str]], list[TensorRule]]] = []
        if adapters == "only":
            levels.append(partial(renamings, new_names=adapter_names(model)))
        elif adapters == "merged":
            levels.append(partial(merge_adapters, model))
        if names == "checkpoint" and adapters != "only":
            levels += _levels_to_files(model, adapters)
        return ExportOptions(
            dtype=dtype,
            rounded=frozenset(products_of(model, output_head(unwrapped(model))) if is_format else ()),
            levels=levels,
            rename=names if callable(names) else str,
            exclude_frozen=exclude_frozen,
        )

    def save_fp16_model(self, save_dir: str | PathLike[str], save_filename: str = "pytorch_model.bin") -> bool:
        """Old name of :meth:`save_16bit_model`."""
        return self.save_16bit_model(save_dir, save_filename)

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        """Returns the full state dict in the compute dtype on rank 0, None elsewhere. Every rank must call it.

        Raises:
            ValueError: Parameters are not sharded.
        """
        if not self._parts.placement.shard_params:
            raise ValueError(
                "_zero3_consolidated_16bit_state_dict is for ZeRO stage 3, and this is stage "
                f"{self._parts.placement.stage}; engine._consolidated_16bit_state_dict() works at every stage"
            )
        return self._consolidated_16bit_state_dict(exclude_frozen_parameters)

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        """Returns the full state dict in the compute dtype on rank 0, None elsewhere, at any stage.

        Every rank must call it.
        """
        self._runtime.leave_backward("_consolidated_16bit_state_dict")
        self._runtime.refuse_offloaded("_consolidated_16bit_state_dict", "lp_params")
        run_state = self._settled_run_state()
        return full_state_dict(run_state, self._saver.exchange, exclude_frozen=exclude_frozen_parameters)

    def load_module_state_dict(
        self,
        checkpoint: dict[str, Any],
        strict: bool = True,
        custom_load_fn: Callable[..., Any] | None = None,
        fetch_z3_params: bool = False,
        z3_params_to_fetch: Any = None,
        allowed_missing_keys: Any = None,
    ) -> None:
        """Fills the model from ``checkpoint["module"]``, a full state dict on every rank. Every rank must call it.

        Args:
            checkpoint: A dict with the key ``module``.
            strict: Names that only one side has are an error.
            custom_load_fn: Called as ``custom_load_fn(src=state_dict, dst=module)`` with every parameter in full,
                instead.
            fetch_z3_params: Not needed: sharded parameters are filled slice by slice.
            z3_params_to_fetch: Not needed, for the same reason.
            allowed_missing_keys: Names that need not be there.

        Raises:
            CheckpointError: The state dict does not fit; nothing was changed.
        """
        self._runtime.leave_backward("load_module_state_dict")
        self._runtime.refuse_offloaded("load_module_state_dict")
        self._runtime.refuse_open_blocks("load_module_state_dict")
        if "module" not in checkpoint:
            raise CheckpointError(
                f"load_module_state_dict: expected a dict with the key 'module', as checkpoints have it, found "
                f"{', '.join(map(repr, list(checkpoint)[:5])) or '(none)'}; a state dict is given as "
                "{'module': state_dict}"
            )
        run_state = self._settled_run_state()
        self._loads += 1
        state_dict = checkpoint["module"]
        if custom_load_fn is not None:
            doing = "load_module_state_dict"
            load_by(run_state, state_dict, custom_load_fn, self._saver.exchange, doing, has_masters=False)
            return
        load_state_dict(
            run_state, state_dict, self._saver.exchange, strict=strict, may_miss=tuple(allowed_missing_keys or ())
        )

    # -- parts -------------------------------------------------------------------------------------------------------

    def _by_one_group(self, what: str, save: Callable[[], bool]) -> bool:
        """Lets the first group write, after all have exchanged masters; the checkpoint has that group's ranks."""
        if self._parts.training_group.has_updates:  # the exchange will change parameters
            self._runtime.refuse_open_blocks(what)
            self._runtime.refuse_offloaded(what)
            self._runtime.free_gathered()
        self._writes_for_all = True
        try:
            return self._parts.training_group.by_one(what, save) is not False
        finally:
            self._writes_for_all = False

    @property
    def _saver(self) -> Saver:
        if self._made_saver is None:
            coordinates = self._parts.coordinates
            group = coordinates.zero_group if coordinates.model_size == 1 else None
            self._made_saver = Saver(self._parts.setup.job.axis_of(group))
        return self._made_saver

    def _settled_run_state(self) -> RunState:
        """Returns the run state after it has ended open work and freed gathered parameters."""
        self._runtime.drop_open_work()
        self._runtime.free_gathered()
        run_state = self._run_state()
        run_state.settle()
        return run_state

    def module_state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """Returns the model's ``state_dict``; sharded parameters are empty tensors in it."""
        model = self._run_state().model
        state = model.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        if exclude_frozen_parameters:
            for name, parameter in model.named_parameters():
                if not parameter.requires_grad:
                    state.pop(prefix + name, None)
        return state


def _levels_to_files(model: Any, adapters: str | None) -> list[Callable[[Collection[str]], list[TensorRule]]]:
    """Returns the conversions to the tensors of files for ``export_weights(names="checkpoint")``."""
    if adapters is None and hasattr(model, "peft_config"):
        raise DeepSpeedConfigError(
            'export_weights(names="checkpoint"): expected adapters="merged" or adapters="only" for a model of PEFT, '
            "found adapters=None; files have no names for a base model beside its adapters. Pass one of them"
        )
    levels: list[Callable[[Collection[str]], list[TensorRule]]] = []
    whole = model
    if getattr(model, "is_pipeline", False):
        whole, beginnings = model.transformers_model, model.names_in_transformers()
        levels.append(partial(rename_beginnings, beginnings))
    if not hasattr(unwrapped(whole), "save_pretrained"):
        raise DeepSpeedConfigError(
            f'export_weights(names="checkpoint"): expected a model of Transformers, found '
            f"{type(unwrapped(model)).__name__}, whose files have no other names; leave names out"
        )
    levels.append(partial(to_files, whole))
    return levels


def _refuse_no_path(call: str, found: Any) -> None:
    if not isinstance(found, (str, PathLike)):
        raise DeepSpeedConfigError(
            f"{call}: expected a folder's path, found {type(found).__name__}; pass the same path on every rank"
        )
