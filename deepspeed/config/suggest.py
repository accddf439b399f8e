"""Which key was probably meant: known confusions, other libraries' names, the nearest spelling, the name elsewhere."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from functools import cache
from os.path import commonprefix

from deepspeed.config.describe import KeyEntry, entries
from deepspeed.config.messages import Path, dotted
from deepspeed.config.sections.root import Root
from deepspeed.config.synonyms import meant_by

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


def nearest(name: str, candidates: Iterable[str]) -> str:
    """The candidate most like ``name``, hyphens and case aside."""
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
        # The cheap upper bounds settle most candidates; only real rivals pay for the exact ratio.
        if matcher.real_quick_ratio() > best and matcher.quick_ratio() > best and matcher.ratio() > best:
            best, choice = matcher.ratio(), candidate
    return choice


def is_one_edit_away(name: str, candidate: str) -> bool:
    """Whether one deleted, inserted, changed or swapped character makes the two equal."""
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


def _likeness(name: str, choice: str) -> float:
    return difflib.SequenceMatcher(None, name.lower(), choice.lower(), autojunk=False).ratio()


@cache
def _by_name() -> dict[str, tuple[KeyEntry, ...]]:
    table: dict[str, tuple[KeyEntry, ...]] = {}
    for entry in entries(Root):
        name = str(entry.path[-1])
        table[name] = (*table.get(name, ()), entry)
    return table


def suggestion(path: Path, valid: Iterable[str]) -> str:
    """What to write instead of an unknown key.

    Args:
        path: The unknown key.
        valid: The keys of the section it stands in.
    """
    name, full = str(path[-1]), dotted(path)
    known = CONFUSIONS.get(full)
    if known is not None:
        return f'did you mean "{known}"?'
    valid = list(valid)
    if (meant_elsewhere := meant_by(name, path[:-1], set(valid))) is not None:
        return f'did you mean "{meant_elsewhere[0]}"{meant_elsewhere[1]}?'
    if len(path) == 1 and name in WRAPPERS:
        return "write what it holds at the top level"
    choice = nearest(name, valid)
    close = is_one_edit_away(name.lower(), choice.lower()) or _likeness(name, choice) >= 0.75
    if not close:
        elsewhere = [entry for entry in _by_name().get(name, ()) if entry.path[:-1] != path[:-1]]
        if elsewhere:
            return f'did you mean "{dotted(elsewhere[0].path)}"?'
    meant = dotted((*path[:-1], choice)) if choice else ""
    if not meant:
        return "no keys are known here"
    return f'did you mean "{meant}"?' if close else f'the closest valid key is "{meant}"'


@cache
def declared_paths() -> frozenset[str]:
    """The dotted names of all declared keys."""
    return frozenset(dotted(entry.path) for entry in entries(Root))
