"""Reports values without effect: one line per group, and none for a value equal to its default."""

from __future__ import annotations

from typing import Any

from deepspeed.config.describe import default_of
from deepspeed.config.messages import ConfigMessages, Path, shown
from deepspeed.config.section import Section, facts_of
from deepspeed.config.sections.root import Root
from deepspeed.config.sections.sparse_attention import KEYS_OF_MODE
from deepspeed.config.sections.zero import ZeroOptimization

ZERO = "zero_optimization"
_CHANGE_TRAINING = frozenset(
    {
        "mics_shard_size",
        "zero_hpz_partition_size",
        "zero_quantized_gradients",
        "zero_quantized_nontrainable_weights",
        "zero_quantized_weights",
    }
)
"""Stage 3's keys that change communication; the others tune stage 3 and are common in files for any stage."""


def note_effects(root: Root, findings: ConfigMessages) -> None:
    """Adds the notices about values without effect."""
    _walk(root, (), findings)
    _stages(root.zero_optimization, findings)
    _other_patterns(root, findings)
    _idle_offload(root.zero_optimization, findings)
    _idle_files(root, findings)
    _idle_nodes(root.zero_optimization, findings)
    _idle_codes(root, findings)
    _idle_tuning(root, findings)
    _idle_sampling(root, findings)
    _idle_quantization(root, findings)
    if root.prescale_gradients and root.gradient_predivide_factor != 1:
        _line(
            [("gradient_predivide_factor",)],
            "prescale_gradients does the whole division before the reduction",
            findings,
        )
    if root.gradient_clipping == 0:
        findings.notice(f"{findings.label(('gradient_clipping',))}: 0 switches clipping off; the default is 1.0")


def _line(paths: list[Path], reason: str, findings: ConfigMessages) -> None:
    if paths:
        verb = "has" if len(paths) == 1 else "have"
        findings.notice(f"{', '.join(findings.label(path) for path in paths)} {verb} no effect: {reason}")


def _changed(section: Section) -> list[tuple[str, Any]]:
    fields = type(section).model_fields
    given = [(name, getattr(section, name)) for name in fields if name in section.model_fields_set]
    return [(name, value) for name, value in given if value != default_of(fields[name])]


def _changed_paths(section: Section, path: Path) -> list[Path]:
    """Returns the paths of the keys given with another value than the default, down to the innermost sections."""
    found: list[Path] = []
    for name, value in _changed(section):
        found += _changed_paths(value, (*path, name)) if isinstance(value, Section) else [(*path, name)]
    return found


def _walk(section: Section, path: Path, findings: ConfigMessages) -> None:
    if not section.model_fields_set:
        return
    fields = type(section).model_fields
    switch = _off_switch(section)
    for name, _ in _changed(section):
        here, facts = (*path, name), facts_of(fields[name])
        if facts.no_effect is not None:
            _line([here], facts.no_effect, findings)
    if switch is not None:
        idle = [each for each in _changed_paths(section, path) if not _explained(section, each[len(path) :])]
        idle = [each for each in idle if each[len(path) :] != (switch[0],)]
        _line(idle, f"{'.'.join(map(str, path))}.{switch[0]} is {shown(switch[1])}", findings)
        return
    for name in fields:
        if name in section.model_fields_set:
            for where, inner in _inner_sections(getattr(section, name), (*path, name)):
                _walk(inner, where, findings)


def _off_switch(section: Section) -> tuple[str, Any] | None:
    """Returns the key that keeps a section off, with its value; None for one that is on or has no such key."""
    shared = getattr(section, "shared_parameters", None)
    if isinstance(shared, Section):  # A technique of compression_training is on when its groups' common part is.
        inner = _off_switch(shared)
        return None if inner is None else (f"shared_parameters.{inner[0]}", inner[1])
    name = type(section).switch()
    if name is None or section.is_used():
        return None
    value = getattr(section, name)
    is_off = not value if isinstance(value, bool) else value <= 1  # a degree of parallelism
    return (name, value) if is_off else None


def _explained(section: Section, path: Path) -> bool:
    """Returns whether the key's own reason was already reported."""
    return facts_of(type(section).model_fields[str(path[0])]).no_effect is not None


def _inner_sections(value: Any, path: Path) -> list[tuple[Path, Section]]:
    if isinstance(value, Section):
        return [(path, value)]
    if isinstance(value, list):
        return [((*path, i), item) for i, item in enumerate(value) if isinstance(item, Section)]
    if isinstance(value, dict):
        return [((*path, name), item) for name, item in value.items() if isinstance(item, Section)]
    return []


def _stages(zero: ZeroOptimization, findings: ConfigMessages) -> None:
    """Keys of a higher stage than the one in force: one line for all, and a warning for those that request more."""
    idle: list[Path] = [
        (ZERO, name)
        for name, _ in _changed(zero)
        if facts_of(ZeroOptimization.model_fields[name]).min_stage > zero.stage
        and facts_of(ZeroOptimization.model_fields[name]).no_effect is None
    ]
    reason = f"only stage 3 uses that, and {ZERO}.stage is {zero.stage}"
    requested = [path for path in idle if path[-1] in _CHANGE_TRAINING]
    _line([path for path in idle if path not in requested], reason, findings)
    if requested:
        names = ", ".join(findings.label(path) for path in requested)
        verb = "has" if len(requested) == 1 else "have"
        findings.warning(f"{names} {verb} no effect: {reason}. Set the stage to 3, or leave this out")


def _idle_tuning(root: Root, findings: ConfigMessages) -> None:
    if root.autotuning is not None and root.autotuning.enabled:
        findings.notice(
            "autotuning.enabled: the script was not started by deepspeed --autotuning tune (or run); it trains as "
            "configured"
        )


def _idle_sampling(root: Root, findings: ConfigMessages) -> None:
    section = root.data_efficiency
    if section is not None and section.packs_tokens and not section.data_sampling.enabled:
        at: Path = ("data_efficiency", "data_sampling")
        idle = [path for path in _changed_paths(section.data_sampling, at) if path[len(at)] != "dynamic_batching"]
        _line(idle, "data_efficiency.data_sampling.enabled is false", findings)


def _idle_quantization(root: Root, findings: ConfigMessages) -> None:
    section = root.weight_quantization
    if section is None or not section.enabled:
        return
    if not section.post_init_quant and not section.quantized_initialization.model_fields_set:
        reason = "neither quantized_initialization nor post_init_quant selects layers"
        _line([("weight_quantization",)], reason, findings)


def _idle_codes(root: Root, findings: ConfigMessages) -> None:
    section = root.communication_compression
    if section.gradients is None:
        idle = [
            ("communication_compression", name)
            for name, _ in _changed(section)
            # warm_up: checked by the engine, since it depends on the optimizer
            if name not in ("weights", "warm_up", "islands")
        ]
        _line(list(idle), "communication_compression.gradients is not given", findings)


def _other_patterns(root: Root, findings: ConfigMessages) -> None:
    """Keys of another pattern of sparse attention than the one chosen."""
    section = root.sparse_attention
    if section is not None:
        known = ("mode", "apply_to", *KEYS_OF_MODE[section.mode])
        idle = [("sparse_attention", name) for name, _ in _changed(section) if name not in known]
        _line(list(idle), f"sparse_attention.mode is {shown(section.mode)}", findings)


def _idle_nodes(zero: ZeroOptimization, findings: ConfigMessages) -> None:
    if zero.stage == 3 and zero.mics_hierarchical_params_gather and zero.mics_shard_size < 1:
        _line([(ZERO, "mics_hierarchical_params_gather")], f"{ZERO}.mics_shard_size is off", findings)


def _idle_files(root: Root, findings: ConfigMessages) -> None:
    zero = root.zero_optimization
    if not any(each is not None and each.device == "nvme" for each in (zero.offload_param, zero.offload_optimizer)):
        _line(_changed_paths(root.aio, ("aio",)), "nothing is offloaded to NVMe", findings)


def _idle_offload(zero: ZeroOptimization, findings: ConfigMessages) -> None:
    for name, section in (("offload_optimizer", zero.offload_optimizer), ("offload_param", zero.offload_param)):
        if section is None:
            continue
        paths = [path for path in _changed_paths(section, (ZERO, name)) if not _explained(section, path[2:])]
        if section.device == "none":
            _line(paths, f'{ZERO}.{name}.device is "none"', findings)
        elif name == "offload_optimizer" and zero.stage == 0:
            _line([(ZERO, name)], f"at {ZERO}.stage 0 nothing is sharded or offloaded", findings)
