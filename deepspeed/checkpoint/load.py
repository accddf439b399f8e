"""Loads checkpoints: finds, matches, checks, agrees, and only then changes anything."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import zip_longest
from logging import WARNING
from pathlib import Path
from typing import Any, TypeVar

from deepspeed.checkpoint import names, restricted
from deepspeed.checkpoint.checkpoint_engine import CheckpointEngine, StateDictFile
from deepspeed.checkpoint.consolidate import full_tensors
from deepspeed.checkpoint.data_position import DataPlan, plan_of, restore_position
from deepspeed.checkpoint.directory import Format, FoundCheckpoint, find, what_exists
from deepspeed.checkpoint.exchange import Exchange
from deepspeed.checkpoint.fill import WeightFiller, load_buffers
from deepspeed.checkpoint.format import STORED_BY, Manifest
from deepspeed.checkpoint.optimizer_state import OptimizerFiller
from deepspeed.checkpoint.param_groups import choose_groups, schedule_for
from deepspeed.checkpoint.plan import Mismatch, ParameterMatch, kind_of_names, match, renamed
from deepspeed.checkpoint.private import PrivateFiller
from deepspeed.checkpoint.reader import CheckpointReader, FileReader
from deepspeed.checkpoint.roster import names_elsewhere
from deepspeed.checkpoint.run_state import COUNTERS, RunState
from deepspeed.checkpoint.source import CheckpointSource, StateDictSource, TrainingState
from deepspeed.checkpoint.states import ENGINE_KEYS, merge_objects, reserved_entries, restore_loader_state
from deepspeed.checkpoint.upstream import open_upstream
from deepspeed.errors import CheckpointError
from deepspeed.logging import log_dist
from deepspeed.schedulers.base import LrSchedule
from deepspeed.zero.access.whole_buckets import full_parameters, publish

T = TypeVar("T")


@dataclass(frozen=True)
class LoadOptions:
    """Holds the arguments of one call of ``load_checkpoint``."""

    root: Path  # folder of checkpoints
    tag: str | None  # name of one; None for the newest
    strict: bool = True  # differences between model and checkpoint are an error
    optimizer_states: bool = True  # restore the optimizer
    lr_scheduler_states: bool = True  # restore the schedule
    module_only: bool = False  # restore the model's weights and buffers and nothing else
    # called with ``(state_dict, module)`` instead of copying weights by name
    custom_load_fn: Callable[..., Any] | None = None
    must_exist: bool = False  # a folder without any checkpoint is an error
    trust_objects: bool = False  # unpickle what the restricted loader would not restore
    engine: CheckpointEngine | None = None  # the program's own checkpoint engine, or None


@dataclass
class LoadResult:
    """Describes what ``load_checkpoint`` has loaded."""

    folder: Path  # the tag folder
    client_state: dict[str, Any]  # the caller's own state and what else the ecosystem expects
    counters: dict[str, int]  # the engine's new counters; empty if only weights were requested
    world_size: int  # data-parallel ranks that saved
    model_size: int  # ranks that held other parts of one copy of the model


@dataclass
class _LoadPlan:
    source: CheckpointSource
    state: TrainingState
    weights: WeightFiller
    optimizer: OptimizerFiller | None
    buffers: dict[str, str]
    private: PrivateFiller
    schedule: dict[str, Any] | None
    data: DataPlan
    notes: list[str] = field(default_factory=list)


def load(run_state: RunState, options: LoadOptions, exchange: Exchange) -> LoadResult | None:
    """Loads a checkpoint into a training run; None without any checkpoint. Every rank must call it.

    Nothing is changed unless every rank has found all it needs, undamaged.

    Raises:
        CheckpointError: The same on all ranks.
    """
    doing = f"load_checkpoint({options.root}{'' if options.tag is None else f', tag={options.tag!r}'})"
    found = _find(run_state, options, exchange, doing)
    if found is None:
        return None
    elsewhere = names_elsewhere(run_state, exchange)
    trained = _trained_names(run_state, exchange, doing) if found.format is not Format.OURS else []
    with ExitStack() as stack:
        prepared = _on_all(
            exchange, doing, lambda: _prepare(run_state, options, found, exchange.rank, elsewhere, trained, stack)
        )
        everyones = exchange.gather((prepared.notes, prepared.data), doing)
        for note in dict.fromkeys(note for notes, _ in everyones for note in notes):
            log_dist(f"{doing}: {note}", level=WARNING)
        if prepared.optimizer is not None:
            prepared.optimizer.cut_runs()
        try:
            data = [plan for _, plan in everyones]
            loaded = _on_all(exchange, doing, lambda: _apply(run_state, options, found, prepared, data, exchange.rank))
        except CheckpointError as error:
            raise CheckpointError(
                f"{error}\nThe model is now partly loaded: load a checkpoint again, or build the engine again"
            ) from error
        publish(run_state.runtime)
        if run_state.runtime.reducer is not None:
            run_state.runtime.reducer.clear()  # gradients of the former weights
        if options.custom_load_fn is not None:
            full = _on_all(exchange, doing, lambda: full_tensors(prepared.source))
            load_by(run_state, full, options.custom_load_fn, exchange, doing, has_masters=True)
    return loaded


def load_by(
    run_state: RunState,
    state_dict: dict[str, Any],
    custom_load_fn: Callable[..., Any],
    exchange: Exchange,
    doing: str,
    *,
    has_masters: bool,
) -> None:
    """Lets the caller's function fill the model, with every parameter in full. Every rank must call it.

    Args:
        custom_load_fn: Called with ``(src=state_dict, dst=model)``.
        has_masters: The masters have the values of the state dict; they stay where they round to what the function
            writes. Otherwise all are read from the parameters.

    Raises:
        CheckpointError: The function raised on another rank. On the rank where it did, its own exception is raised.
    """
    failure: Exception | None = None
    with full_parameters(run_state.runtime):
        try:
            custom_load_fn(src=state_dict, dst=run_state.model)
        except Exception as error:  # the other ranks wait below
            failure = error
    everyones = exchange.gather(None if failure is None else f"{type(failure).__name__}: {failure}", doing)
    if has_masters:
        for master in run_state.runtime.masters:
            master.adopt_all()
            master.bucket.remember_values()
    elif run_state.updater is not None:
        run_state.updater.refresh_fp32_params()
    if failure is not None:
        raise failure
    for rank, text in enumerate(everyones):
        if text is not None:
            raise CheckpointError(
                f"{doing}: custom_load_fn failed on rank {rank}: {text}\nThe model is now partly loaded: load a "
                "checkpoint again, or build the engine again"
            )


def load_state_dict(
    run_state: RunState, state_dict: dict[str, Any], exchange: Exchange, *, strict: bool, may_miss: Iterable[str]
) -> None:
    """Fills the model from a full state dict that every rank has, but for ``may_miss``. Every rank must call it.

    Raises:
        CheckpointError: The state dict does not fit; nothing was changed.
    """
    doing = "load_module_state_dict"
    source = StateDictSource(state_dict, run_state.extra_state_owners())
    elsewhere = names_elsewhere(run_state, exchange)

    def prepare() -> tuple[WeightFiller, dict[str, str], Mismatch]:
        matches, buffers, difference = match(source, run_state.shapes(), run_state.aliases(), run_state.buffers())
        difference.missing = [name for name in difference.missing if name not in set(may_miss)]
        difference.unexpected = [name for name in difference.unexpected if name not in elsewhere]
        _check_fit("the state dict", difference, strict=strict)
        weights = WeightFiller(run_state.runtime, source, matches)
        weights.check_state()
        return weights, buffers, difference

    weights, buffers, difference = _on_all(exchange, doing, prepare)
    if difference:
        log_dist(f"{doing}: the model and the state dict differ:\n{difference.table()}", level=WARNING)
    weights.fill()
    load_buffers(source, buffers, run_state.buffers())
    for key, module in run_state.extra_state_owners().items():
        if key in state_dict:
            module.set_extra_state(state_dict[key])
    publish(run_state.runtime)


def _on_all(exchange: Exchange, doing: str, action: Callable[[], T]) -> T:
    """Returns this rank's result of ``action``, once it has succeeded on all ranks."""
    results: list[T] = []
    exchange.together(doing, lambda: results.append(action()))
    return results[0]


def _find(run_state: RunState, options: LoadOptions, exchange: Exchange, doing: str) -> FoundCheckpoint | None:
    """Returns the same checkpoint on all ranks."""

    def find_checkpoint() -> FoundCheckpoint | None:
        universal = run_state.settings.load_universal and options.tag is None
        found = find(options.root, options.tag, prefer_universal=universal)
        if found is None and options.must_exist:
            raise CheckpointError(
                f"must_exist=True: {options.root}: {what_exists(options.root)}; correct the folder or the tag"
            )
        return found

    all_found = exchange.together(doing, find_checkpoint)
    seen = {None if found is None else (found.tag, found.format) for found in all_found}
    if len(seen) > 1:
        rows = [f"  rank {r}: {'nothing' if f is None else f.folder}" for r, f in enumerate(all_found)]
        raise CheckpointError(
            f"{doing}: ranks see different checkpoints; the folder must be the same for all of them (shared by all "
            "nodes, or complete on each):\n" + "\n".join(rows[:40])
        )
    if all_found[0] is None:
        log_dist(
            f"{doing}: NO CHECKPOINT WAS LOADED, because {what_exists(options.root)}; training starts afresh",
            level=WARNING,
        )
    return all_found[exchange.rank]


def _trained_names(run_state: RunState, exchange: Exchange, doing: str) -> list[list[str]]:
    """Returns the parameter names of each param group: this rank's, or in a pipeline those of all stages in order."""
    if not run_state.is_pipeline:
        return run_state.trained_names()
    everyones = exchange.together(doing, run_state.trained_names)
    by_number = zip_longest(*everyones, fillvalue=[])  # stages may have different numbers of groups
    return [list(dict.fromkeys(name for names in same for name in names)) for same in by_number]


def _open(
    found: FoundCheckpoint,
    run_state: RunState,
    options: LoadOptions,
    rank: int,
    trained: list[list[str]],
    stack: ExitStack,
) -> tuple[CheckpointSource, TrainingState]:
    if found.format is not Format.OURS:
        upstream = open_upstream(
            found.folder,
            found.format,
            trust=options.trust_objects,
            trained=trained,
            layer_names=run_state.layer_names(),
        )
        return upstream, upstream.state
    manifest = Manifest.read(found.folder)
    files = None
    if options.engine is not None and STORED_BY in manifest.facts:
        files = [
            StateDictFile(found.folder, record, options.engine)
            if record.runs or record.tensors
            else FileReader(found.folder, record)
            for record in manifest.files
        ]
    opened = CheckpointReader(found.folder, verify=run_state.settings.verify_checksums, manifest=manifest, files=files)
    reader = stack.enter_context(opened)
    return reader, read_training_state(reader, rank, trust=options.trust_objects)


def _prepare(
    run_state: RunState,
    options: LoadOptions,
    found: FoundCheckpoint,
    rank: int,
    elsewhere: set[str],
    trained: list[list[str]],
    stack: ExitStack,
) -> _LoadPlan:
    """Does everything that can fail, before anything is changed."""
    source, state = _open(found, run_state, options, rank, trained, stack)
    notes = []
    matches, buffers, difference = match(source, run_state.shapes(), run_state.aliases(), run_state.buffers())
    if not matches and difference:  # perhaps another form of the same model (pipeline or Transformers)
        for beginnings in run_state.renamings():
            names = renamed(source, beginnings)
            if names is not None:
                matches, buffers, difference = match(
                    names, run_state.shapes(), run_state.aliases(), run_state.buffers()
                )
                notes.append(
                    f"it was saved from {kind_of_names(source.parameters)}; its names were translated "
                    "to those of this model"
                )
                break
    difference.unexpected = [name for name in difference.unexpected if name not in elsewhere]
    if lost := run_state.own_buffers().intersection(difference.missing):
        difference.missing = [name for name in difference.missing if name not in lost]
        notes.append(
            f"it has no buffers of some experts (earlier releases saved those of one rank): {', '.join(sorted(lost))}; "
            "these keep their values"
        )
    strict = options.strict and options.custom_load_fn is None
    if strict and not matches and run_state.shapes() and source.parameters:
        tag = "" if options.tag is None else f" -t {options.tag}"
        expected, there = kind_of_names(run_state.shapes()), kind_of_names(source.parameters)
        raise CheckpointError(
            f"{found.folder} does not fit the model; nothing was loaded: expected the weights of {expected}, found "
            f"those of {there}; no name is in both. Load it into a model of the kind that saved it. Or write its "
            f"weights by `python {options.root}/zero_to_fp32.py {options.root} OUTPUT{tag}`, give them the names of "
            "this model, and load_state_dict them before initialize (deepspeed.pipe.transformers_state_dict renames "
            "those of PipelineModule.from_transformers)"
        )
    _check_fit(str(found.folder), difference, strict=strict)
    weights = WeightFiller(
        run_state.runtime, source, matches, use_masters=run_state.use_fp32_weights or run_state.updater is None
    )
    weights.check_state()
    wanted = weights.wanted()
    optimizer = None
    if difference:
        notes.append(f"the model and the checkpoint differ (load_module_strict=False):\n{difference.table()}")
    if run_state.updater is not None and options.optimizer_states and not options.module_only:
        optimizer = OptimizerFiller(run_state, source, state, matches)
        optimizer.check()
        wanted += optimizer.wanted()
        notes += optimizer.notes
    if state.withheld:
        notes.append(
            f"not restored, because that would run code: {', '.join(state.withheld)}; if you trust the file, pass "
            "allow_pickled_objects=True"
        )
    _check_scheduler(run_state, options, state)
    source.check(wanted)
    private = PrivateFiller(run_state, source, state, rank, wanted=optimizer is not None)
    notes += private.notes
    schedule, data = _schedule(run_state, state, matches), plan_of(run_state, state)
    return _LoadPlan(source, state, weights, optimizer, buffers, private, schedule, data, notes)


def _schedule(
    run_state: RunState, state: TrainingState, matches: Mapping[str, ParameterMatch]
) -> dict[str, Any] | None:
    """Returns the saved state of the learning-rate schedule, with one entry per param group of this rank."""
    present = run_state.schedule_state()
    if state.lr_scheduler is None or present is None:
        return state.lr_scheduler
    choices = choose_groups(state.param_groups, matches, run_state.group_names())
    return schedule_for(state.lr_scheduler, present, len(state.param_groups), choices)


def _check_fit(what: str, difference: Mismatch, *, strict: bool) -> None:
    if difference.shapes or (strict and difference):
        remedy = ""
        if not difference.shapes:
            remedy = "\nload_module_strict=False (strict=False) loads what fits"
        raise CheckpointError(f"{what} does not fit the model; nothing was loaded:\n{difference.table()}{remedy}")


def _check_scheduler(run_state: RunState, options: LoadOptions, state: TrainingState) -> None:
    if not _loads_scheduler(run_state, options, state):
        return
    cut = [name for name in state.withheld if name.startswith("lr_scheduler")]
    if cut:
        raise CheckpointError(
            f"the state of the schedule holds objects that only code can restore ({', '.join(cut)}); if you trust the "
            "file, pass allow_pickled_objects=True, else load_lr_scheduler_states=False"
        )


def _loads_scheduler(run_state: RunState, options: LoadOptions, state: TrainingState) -> bool:
    wanted = options.lr_scheduler_states and not options.module_only
    return wanted and state.lr_scheduler is not None and hasattr(run_state.lr_scheduler, "load_state_dict")


def _apply(
    run_state: RunState,
    options: LoadOptions,
    found: FoundCheckpoint,
    prepared: _LoadPlan,
    data: list[DataPlan],
    rank: int,
) -> LoadResult:
    """Copies everything on this rank. No communication."""
    state = prepared.state
    prepared.weights.fill()
    prepared.private.fill()
    load_buffers(prepared.source, prepared.buffers, run_state.buffers())
    for key, module in run_state.extra_state_owners().items():
        if key in state.extra_state:
            module.set_extra_state(state.extra_state[key])
    loads_scheduler = _loads_scheduler(run_state, options, state)
    if prepared.optimizer is not None:
        prepared.optimizer.fill()
        # the schedules of data are equal on all ranks, and so fit any number of them
        sampler = state.model_states.get("data_sampler")
        if sampler is not None and run_state.sampler_state() is not None:
            run_state.dataloader.load_sampler_state(sampler)
        for key, schedule in run_state.states.items():
            schedule.load_state_dict(state.model_states.get(key))
        restore_position(run_state, state, data, rank)
    if loads_scheduler:
        run_state.lr_scheduler.load_state_dict(prepared.schedule)
        has_rates = prepared.optimizer is not None and any("lr" in group for group in state.param_groups)
        if (
            isinstance(run_state.lr_scheduler, LrSchedule)
            and not has_rates
            and run_state.lr_scheduler.last_batch_iteration >= 0
        ):
            # Learning rates were not restored, so write the present ones of the schedule.
            run_state.lr_scheduler.step(run_state.lr_scheduler.last_batch_iteration)
    client_state = {key: value for key, value in state.model_states.items() if key not in ENGINE_KEYS}
    if options.module_only:
        client_state = {key: value for key, value in state.model_states.items() if key != "module"}
    if loads_scheduler or options.module_only:
        client_state.pop("lr_scheduler", None)
    if prepared.optimizer is not None or options.module_only:
        client_state.pop("optimizer", None)
    client_state |= reserved_entries(client_state)
    counters = {} if options.module_only else {key: int(state.counters.get(key, 0)) for key in COUNTERS}
    return LoadResult(found.folder, client_state, counters, state.world_size, state.mesh.get("model", 1))


def read_training_state(reader: CheckpointReader, rank: int, *, trust: bool) -> TrainingState:
    """Returns a checkpoint's state but for large tensors; ``trust``: also objects saved apart, which may run code.

    Raises:
        CheckpointError: A file is missing, damaged, or refused by the restricted loader.
    """
    where = str(reader.folder / names.TRAINING_STATE)
    stage = reader.manifest.facts.get("zero_stage")
    top = _load(reader, names.model_states_file(stage if isinstance(stage, int) else 0))
    training = _load(reader, names.TRAINING_STATE)
    objects = reader.read_file(names.OBJECTS)
    withheld: list[str] = []
    if objects is not None:
        withheld = merge_objects(objects, str(reader.folder / names.OBJECTS), training, top, trust=trust)
    try:
        state = TrainingState(
            counters={str(key): int(value) for key, value in training["counters"].items()},
            world_size=int(training["world_size"]),
            mesh=_mesh(training),
            optimizer=training["optimizer"],
            param_groups=[{**group, "params": list(group["params"])} for group in training["param_groups"]],
            scalars={name: dict(values) for members, values in training["scalars"] for name in members},
            loss_scaler=training["loss_scaler"],
            skipped_in_a_row=int(training["skipped_in_a_row"]),
            lr_scheduler=training["lr_scheduler"],
            extra_state=dict(training["extra_state"]),
            model_states=top,
            withheld=withheld,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{where} does not hold a training state ({error!r}); the checkpoint was altered"
        ) from None
    # A converted checkpoint has no states of ranks.
    if rank >= 0 and reader.manifest.file(names.rank_state_file(rank)) is not None:
        state.rank_state = _load(reader, names.rank_state_file(rank))
        state.withheld += restore_loader_state(state.rank_state, trust=trust)
    return state


def _mesh(training: dict[str, Any]) -> dict[str, int]:
    mesh = training.get("mesh", {"data": training["world_size"], "model": 1})  # version 1 knew no other axis
    return {str(name): int(size) for name, size in mesh.items()}


def _load(reader: CheckpointReader, name: str) -> dict[str, Any]:
    data = reader.read_file(name)
    if data is None:
        raise CheckpointError(
            f"{reader.folder}: {name} is missing; the checkpoint is damaged. Use another tag, or copy it again from "
            "where it was written"
        )
    value = restricted.loads(data, str(reader.folder / name))
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{reader.folder / name} holds a {type(value).__name__}, expected a dict; "
            "the file is damaged. Load another tag"
        )
    return value
