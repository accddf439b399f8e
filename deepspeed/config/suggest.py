"""Suggests the key that was probably meant: known confusions, other libraries' names, near spellings."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from functools import cache
from os.path import commonprefix

from deepspeed.config.deprecated import old_names
from deepspeed.config.describe import KeyEntry, entries
from deepspeed.config.messages import Path, dotted
from deepspeed.config.sections.optimizer import OWN_OPTIMIZERS
from deepspeed.config.sections.root import Root
from deepspeed.config.sections.scheduler import OWN_SCHEDULERS

# As found in public files and documents: full dotted name as written, and what to write instead.
CONFUSIONS: dict[str, str] = {
    "zero_optimisation": "zero_optimization",
    "zero_optimiser": "zero_optimization",
    "zero_optimizer": "zero_optimization",
    "zero": "zero_optimization",
    "train_micro_batch_size_per_device": "train_micro_batch_size_per_gpu",
    "grandient_accumulation_steps": "gradient_accumulation_steps",
    "optimizer.Type": "optimizer.type",
    "optimizer.torch_adam": "optimizer.params.torch_adam",
    "optimizer.lr": "optimizer.params.lr",
    "torch_autocast.enable": "torch_autocast.enabled",
    "flops_profiler.step": "flops_profiler.profile_step",
    "activation_checkpointing.partition_activation": "activation_checkpointing.partition_activations",
    "activation_checkpointing.partitioned_activations": "activation_checkpointing.partition_activations",
    "activation_checkpointing.contiguous_checkpointing": "activation_checkpointing.contiguous_memory_optimization",
    "activation_checkpointing.checkpoint_in_cpu": "activation_checkpointing.cpu_checkpointing",
    "timers.throughputs": "timers.throughput",
    "quantize_training.quantize-algo": "quantize_training.quantize_algo",
    "optimizer.params.adamw_mode": "optimizer.params.adam_w_mode",
}
WRAPPERS = ("monitor_config", "comms_config", "session_params")
"""Objects of the top level around keys that belong there, as documents show them; they never had an effect."""


def nearest(name: str, candidates: Iterable[str]) -> str:
    """Returns the candidate most like ``name``, hyphens and case aside."""
    plain = name.strip().lower().replace("-", "_")
    candidates = list(candidates)
    for candidate in candidates:
        if is_one_edit_away(plain, candidate):
            return candidate
    # The matcher keeps statistics of its second sequence, so that one holds the name that stays the same.
    matcher = difflib.SequenceMatcher(None, "", plain, autojunk=False)
    best, choice = -1.0, ""
    for candidate in candidates:
        matcher.set_seq1(candidate.lower())
        # Cheap upper bounds exclude most candidates; the exact ratio is computed for the others.
        if matcher.real_quick_ratio() > best and matcher.quick_ratio() > best and matcher.ratio() > best:
            best, choice = matcher.ratio(), candidate
    return choice


def is_one_edit_away(name: str, candidate: str) -> bool:
    """Returns whether one deleted, inserted, changed or swapped character makes the two equal."""
    longer = max(len(name), len(candidate))
    if abs(len(name) - len(candidate)) > 1 or longer < 3:
        return name == candidate
    head = len(commonprefix((name, candidate)))
    tail = len(commonprefix((name[head:][::-1], candidate[head:][::-1])))
    same = head + tail
    if same >= longer - 1:
        return True
    middle = name[head : head + 2]
    return len(name) == len(candidate) and same == longer - 2 and middle[::-1] == candidate[head : head + 2]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns a clause for a message with the most similar known name; empty if none is similar."""
    by_lowered = {candidate.lower(): candidate for candidate in known}
    matches = difflib.get_close_matches(name.lower(), by_lowered, n=1)
    return f", did you mean {by_lowered[matches[0]]}?" if matches else ""


def _likeness(name: str, choice: str) -> float:
    return difflib.SequenceMatcher(None, name.lower(), choice.lower(), autojunk=False).ratio()


@cache
def _by_name() -> dict[str, tuple[KeyEntry, ...]]:
    table: dict[str, tuple[KeyEntry, ...]] = {}
    for entry in entries(Root):
        name = str(entry.path[-1])
        table[name] = (*table.get(name, ()), entry)
    for section, models in (("optimizer", OWN_OPTIMIZERS), ("scheduler", OWN_SCHEDULERS)):
        for model in models.values():
            for entry in entries(model, (section, "params")):
                name = str(entry.path[-1])
                table[name] = (*table.get(name, ()), entry)
    return table


def suggestion(path: Path, valid: Iterable[str]) -> str:
    """Returns what to write instead of an unknown key."""
    valid = list(valid)
    meant = _probably_meant(path, valid)
    if meant is None and (elsewhere := [e for e in _by_name().get(str(path[-1]), ()) if e.path[:-1] != path[:-1]]):
        meant = f'"{dotted(elsewhere[0].path)}"'
    if meant is not None:
        return f"did you mean {meant}?"
    choice = nearest(str(path[-1]), valid)
    return f'the closest valid key is "{dotted((*path[:-1], choice))}"' if choice else "no keys are known here"


def _probably_meant(path: Path, valid: list[str]) -> str | None:
    """Returns the key, in quotation marks, that an unknown one resembles or is known to stand for, or None."""
    name, full = str(path[-1]), dotted(path)
    if (known := CONFUSIONS.get(full)) is not None:
        return f'"{known}"'
    if (meant_elsewhere := meant_by(name, path[:-1], set(valid))) is not None:
        return f'"{meant_elsewhere[0]}"{meant_elsewhere[1]}'
    choice = nearest(name, valid)
    if is_one_edit_away(name.lower(), choice.lower()) or _likeness(name, choice) >= 0.75:
        return f'"{dotted((*path[:-1], choice))}"'
    return None


def is_foreign(name: str, valid: list[str]) -> bool:
    """Returns whether a key of the top level belongs to another program: no key of this package can be meant by it.

    Such programs keep settings of their own beside this package's, often with hyphens, as GPT-NeoX does. One word that
    only sections like monitors have, such as ``seed``, is as good as unknown at the top level.
    """
    valid = [*valid, *old_names(()), "allgather_size"]
    if name in WRAPPERS:
        return True
    if "." in name:
        return name.partition(".")[0] not in valid
    if "-" in name:
        plain = name.replace("-", "_")
        return plain not in valid and not is_one_edit_away(plain, nearest(plain, valid))
    sections = {entry.path[0] for entry in _by_name().get(name, ())}
    is_known = bool(sections) if "_" in name else not sections.isdisjoint(_SECTIONS)
    return not is_known and _probably_meant((name,), valid) is None


@cache
def declared_paths() -> frozenset[str]:
    """Returns the dotted names of all declared keys."""
    return frozenset(dotted(entry.path) for entry in entries(Root))


_ADAM, _SCHEDULE, _ZERO = "optimizer.params", "scheduler.params", "zero_optimization"
_MICRO, _STEPS = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
_FIRST, _SECOND = f"{_ADAM}.betas|, its first number", f"{_ADAM}.betas|, its second number"
_COSINE = f"{_SCHEDULE}.cos_min_ratio|, a share of the learning rate"
_OFFLOAD_PARAM, _OFFLOAD_OPTIMIZER = f"{_ZERO}.offload_param", f"{_ZERO}.offload_optimizer"
_STAGES = "pipeline.stages|; the program gives it, as PipelineModule(num_stages=...)"
_RECOMPUTE = "activation_checkpointing|; the model's own switch (gradient_checkpointing_enable()) turns it on"

# Sections, besides the top level, in which these names are recognized; elsewhere they mean other things.
_SECTIONS = ("optimizer", "scheduler", "zero_optimization", "fp16", "bf16", "activation_checkpointing", "checkpoint")

# Names in other libraries; the keys that may be meant, best first; after a bar, further advice.
_MEANINGS: tuple[tuple[str, ...], ...] = (
    # the optimizer: Transformers, Accelerate, Keras, Megatron, timm, Lightning, fairseq, JAX
    ("learning_rate base_lr lr_rate", f"{_ADAM}.lr"),
    ("peak_lr max_lr max_learning_rate", f"{_SCHEDULE}.warmup_max_lr", f"{_ADAM}.lr"),
    ("wd decay l2 weight_decay_rate l2_regularization", f"{_ADAM}.weight_decay"),
    ("beta1 beta_1 b1 adam_beta1", _FIRST),
    ("beta2 beta_2 b2 adam_beta2", _SECOND),
    ("beta adam_betas", f"{_ADAM}.betas|, a list of two numbers"),
    ("epsilon adam_epsilon adam_eps", f"{_ADAM}.eps"),
    ("adamw optim optimizer_type optimizer_name", "optimizer.type"),
    # clipping
    (
        "max_grad_norm max_norm clip_grad clip_grad_norm clip_norm clipnorm global_clipnorm grad_clip "
        "grad_norm_clip gradient_clip gradient_clip_val gradient_clip_norm",
        "gradient_clipping",
    ),
    # the schedule
    ("lr_scheduler", "scheduler"),
    ("lr_scheduler_type lr_decay_style", "scheduler.type"),
    ("num_warmup_steps warmup_steps warmup_updates warmup_iters lr_warmup_iters", f"{_SCHEDULE}.warmup_num_steps"),
    ("warmup_ratio warmup_fraction lr_warmup_fraction", f"{_SCHEDULE}.warmup_num_steps|, in steps"),
    (
        "num_training_steps total_steps max_steps num_steps decay_steps train_iters lr_decay_iters t_max",
        f"{_SCHEDULE}.total_num_steps",
    ),
    ("warmup_init_lr lr_warmup_init warmup_start_lr", f"{_SCHEDULE}.warmup_min_lr"),
    ("min_lr", _COSINE, f"{_SCHEDULE}.warmup_min_lr"),
    ("min_lr_ratio min_lr_rate eta_min", _COSINE),
    # batches and accumulation
    (
        "batch_size per_device_train_batch_size per_gpu_train_batch_size per_device_batch_size batch_size_per_gpu "
        "micro_batch_size_per_gpu train_micro_batch_size micro_batch_size",
        _MICRO,
    ),
    ("global_batch_size effective_batch_size total_batch_size", "train_batch_size"),
    (
        "accumulate_grad_batches accumulation_steps grad_accum_steps grad_accumulation_steps "
        "gradient_accumulation num_gradient_accumulation_steps iter_size update_freq",
        _STEPS,
    ),
    # precision
    ("mixed_precision", "bf16|, fp16 or torch_autocast", "fp16"),
    ("precision dtype torch_dtype mixed_precision_policy", "bf16|, fp16 or torch_autocast"),
    ("half float16", "fp16"),
    ("bfloat16", "bf16"),
    ("autocast", "torch_autocast"),
    ("param_dtype", "data_types.param_dtype"),
    ("buffer_dtype", "data_types.buffer_dtype"),
    ("reduce_dtype", "communication_data_type"),
    ("init_scale", "fp16.initial_scale_power|, the power of two", "bf16.initial_scale_power"),
    ("initial_loss_scale", "fp16.initial_scale_power|, the power of two"),
    ("growth_interval scale_window", "fp16.loss_scale_window"),
    # sharding: FSDP, Accelerate, Lightning, fairscale
    ("zero_stage", f"{_ZERO}.stage"),
    ("sharding_strategy fsdp_sharding_strategy", f"{_ZERO}.stage|: FULL_SHARD is 3, SHARD_GRAD_OP 2, NO_SHARD 0"),
    ("reshard_after_forward", f"{_ZERO}.stage|: true is 3, false is 2"),
    ("fsdp fsdp_config", _ZERO),
    ("ddp", f"{_ZERO}.stage|, 0"),
    ("cpu_offload", _OFFLOAD_OPTIMIZER, _OFFLOAD_PARAM),
    ("offload_params offload_parameters fsdp_offload_params", _OFFLOAD_PARAM),
    ("offload_param_device params_device", f"{_OFFLOAD_PARAM}.device"),
    ("offload_optimizer_device optimizer_device", f"{_OFFLOAD_OPTIMIZER}.device"),
    ("offload_optimizer_states", _OFFLOAD_OPTIMIZER),
    ("bucket_cap_mb", f"{_ZERO}.reduce_bucket_size|, in elements"),
    ("allgather_bucket_cap_mb", f"{_ZERO}.allgather_bucket_size|, in elements"),
    ("forward_prefetch backward_prefetch", f"{_ZERO}.stage3_prefetch_bucket_size"),
    ("overlap_grad_reduce", f"{_ZERO}.overlap_comm"),
    ("hybrid_shard_size", f"{_ZERO}.zero_hpz_partition_size"),
    (
        "zero3_save_16bit_model gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save",
        f"{_ZERO}.stage3_gather_16bit_weights_on_model_save",
    ),
    # recomputation
    ("gradient_checkpointing checkpoint_activations recompute_granularity", _RECOMPUTE),
    ("cpu_offload_activations", "activation_checkpointing.cpu_checkpointing"),
    # logging, saving, data
    ("logging_steps log_interval log_every_n_steps print_freq", "steps_per_print"),
    ("save_total_limit save_top_k", "checkpoint.keep_last"),
    ("async_checkpoint", "checkpoint.async_save"),
    ("dataloader_drop_last_batch drop_last", "dataloader_drop_last"),
    ("context_parallel_size cp_size sp_size", "sequence_parallel_size"),
    ("tensor_model_parallel_size tp_size", "tensor_parallel.autotp_size"),
    ("pipeline_model_parallel_size pp_size", _STAGES),
    ("torch_compile", "compile"),
)
SYNONYMS = {name: tuple(keys) for names, *keys in _MEANINGS for name in names.split()}
"""By unknown name: the keys that may be meant."""


def meant_by(name: str, section: tuple[object, ...], valid: set[str]) -> tuple[str, str] | None:
    """Returns the key that another library's ``name`` stands for, and what to add to it.

    Returns:
        None if no section has this name, or the key would not be valid there either.
    """
    if section and section[0] not in _SECTIONS:
        return None
    here = ".".join(map(str, section))
    targets = [target.partition("|")[::2] for target in SYNONYMS.get(name.strip().lower().replace("-", "_"), ())]
    usable = [(key, note) for key, note in targets if key.rpartition(".")[0] != here or key.rpartition(".")[2] in valid]
    in_section = [each for each in usable if each[0].rpartition(".")[0] == here]
    return next(iter([*in_section, *usable]), None)
