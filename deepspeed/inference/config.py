"""Reads the configuration of ``init_inference``: a dict or a file, together with keywords."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from deepspeed.config.messages import ConfigMessages
from deepspeed.config.reader import build, clean, structural_copy
from deepspeed.config.section import facts_of
from deepspeed.config.sections.inference import Inference as DeepSpeedInferenceConfig
from deepspeed.config.sections.inference import InferenceTp as DeepSpeedTPConfig
from deepspeed.config.sections.zero import ZeroOptimization as DeepSpeedZeroConfig
from deepspeed.config.source import read_source

__all__ = ["DeepSpeedInferenceConfig", "DeepSpeedTPConfig", "DeepSpeedZeroConfig", "InferenceSettings", "read_settings"]

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "int8": torch.bfloat16}


@dataclass(frozen=True)
class InferenceSettings:
    """The configuration of ``init_inference``, validated."""

    config: DeepSpeedInferenceConfig  # all keys
    dtype: torch.dtype  # dtype in which the model computes
    weight_bits: int | None  # width of the weights of linear layers: 4 or 8; None: they have ``dtype``
    # settings of quantized weights, by a part of the names of layers; other layers have ``dtype``
    parts: dict[str, Any]
    zero: dict[str, Any] | None  # the section ``zero`` as written, for :func:`deepspeed.initialize`; None without one
    checkpoint: str | dict[str, Any] | None  # where weights are read from; None: the model has them
    save_path: str | None  # folder in which each rank writes its weights; None: they are not written
    longest_prompt: int | None  # largest number of tokens in a prompt; None if the configuration does not set it
    notices: tuple[str, ...]  # lines for the log


def read_settings(config: Any, keywords: dict[str, Any]) -> InferenceSettings:
    """Reads ``init_inference(model, config, **keywords)``; DeepSpeedConfigError lists every problem."""
    if isinstance(config, DeepSpeedInferenceConfig):
        config = config.model_dump(exclude_unset=True)
    document = read_source({} if config is None else config)
    findings = ConfigMessages(document.lines, {}, document.name)
    for sentence in document.problems:
        findings.add((), sentence)
    data = structural_copy(document.data)
    for name, value in keywords.items():
        if name in data and data[name] != value:
            findings.problem((name,), f"{data[name]!r} in the configuration and {value!r} as keyword; give one of them")
        data[name] = structural_copy(value)
    _move_old_names(data, findings)
    read = build(DeepSpeedInferenceConfig, clean(DeepSpeedInferenceConfig, data, (), findings), (), findings)
    assert read is not None, "no key is required"
    _check(read, findings)
    findings.raise_if_any()
    zero = data.get("zero")
    return InferenceSettings(
        config=read,
        dtype=_DTYPES[read.dtype],
        weight_bits=read.quant.weight.num_bits if read.dtype == "int8" else None,
        parts=_parts(read) if read.dtype != "int8" else {},
        zero=dict(zero) if isinstance(zero, dict) and read.zero.stage else None,
        checkpoint=read.checkpoint if read.checkpoint is not None else read.checkpoint_config.checkpoint_dir,
        save_path=read.save_mp_checkpoint_path or read.checkpoint_config.save_mp_checkpoint_path,
        longest_prompt=read.max_out_tokens if "max_out_tokens" in read.model_fields_set else None,
        notices=(*findings.notices, *_effects(read)),
    )


def _parts(read: DeepSpeedInferenceConfig) -> dict[str, Any]:
    weight = read.quant.weight
    if weight.post_init_quant:
        return dict(weight.post_init_quant)
    return {"": weight.quantized_initialization} if weight.quantized_initialization else {}


def _move_old_names(data: dict[str, Any], findings: ConfigMessages) -> None:
    for old, (section, name) in {
        "mp_size": ("tensor_parallel", "tp_size"),
        "mpu": ("tensor_parallel", "mpu"),
        "ep_size": ("moe", "ep_size"),
        "ep_group": ("moe", "ep_group"),
        "ep_mp_group": ("moe", "ep_mp_group"),
        "moe_experts": ("moe", "num_experts"),
        "moe_type": ("moe", "type"),
    }.items():
        if old not in data:
            continue
        value = data.pop(old)
        spelled = "tp" if section == "tensor_parallel" and "tp" in data else section
        inner = data.setdefault(spelled, {})
        if not isinstance(inner, dict):
            findings.problem(
                (old,),
                f"is an old name of {section}.{name}, and {section} is not an object; give {section}.{name} alone",
            )
        elif inner.setdefault(name, value) != value:
            findings.problem((old,), f"found {value!r}, and {inner[name]!r} for {section}.{name}; give one of them")


def _check(read: DeepSpeedInferenceConfig, findings: ConfigMessages) -> None:
    weight, activation = read.quant.weight, read.quant.activation
    if read.dtype == "int8" and not read.quant.enabled:
        findings.problem(
            ("quant", "enabled"), "expected true with dtype int8, found false; use dtype bf16, or leave the key out"
        )
    if weight.num_bits not in (4, 8):
        findings.problem(("quant", "weight", "num_bits"), f"expected 4 or 8, found {weight.num_bits}")
    if activation.model_fields_set & {"num_bits", "q_type", "q_groups"}:
        findings.problem(
            ("quant", "activation"), "activations stay in 16 bits; leave the section out (weights are quantized alone)"
        )
    if read.injection_policy_tuple is not None and read.injection_policy is not None:
        findings.problem(("injection_policy_tuple",), "injection_policy gives the same by class; give one of them")
    if read.moe.ep_size > 1:
        findings.problem(
            ("moe", "ep_size"),
            f"expected 1, as experts are not spread over ranks in inference; found {read.moe.ep_size}",
        )
    if read.zero.stage not in (0, 3):
        findings.problem(
            ("zero", "stage"),
            f"expected 0 or 3, as only stage 3 saves memory without an optimizer; found {read.zero.stage}",
        )


def _effects(read: DeepSpeedInferenceConfig) -> list[str]:
    is_set = read.model_fields_set
    lines = []
    for name, field in type(read).model_fields.items():
        why, value = facts_of(field).no_effect, getattr(read, name)
        if why is not None and name in is_set and value and value != "auto":
            lines.append(f"{name} has no effect: {why}")
    if not (read.tensor_parallel.enabled and read.tensor_parallel.tp_size > 1):
        unused = [name for name in ("injection_policy", "injection_policy_tuple") if getattr(read, name) is not None]
        lines += [f"{name} has no effect: it sets how layers are cut, and tp_size is 1" for name in unused]
    if read.moe.model_fields_set - {"ep_size"}:
        lines.append("moe has no effect: the model's own experts are used")
    if "qkv" in read.quant.model_fields_set:
        lines.append("quant.qkv has no effect: projections of attention are linear layers like others")
    weight = read.quant.weight
    if read.dtype == "int8":
        natural = "symmetric" if weight.num_bits == 8 else "asymmetric"
        if "q_type" in weight.model_fields_set and weight.q_type != natural:
            lines.append(f"quant.weight.q_type has no effect: weights of {weight.num_bits} bits are {natural}")
        if "q_groups" in weight.model_fields_set:
            lines.append("quant.weight.q_groups has no effect: scales belong to rows (8 bits) or to 64 inputs (4 bits)")
    elif "weight" in read.quant.model_fields_set and not (weight.post_init_quant or weight.quantized_initialization):
        lines.append(f"quant.weight has no effect with dtype {read.dtype}; give dtype int8")
    return lines
