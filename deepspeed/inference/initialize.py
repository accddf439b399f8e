"""Makes an inference engine from a model: :func:`init_inference`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.cpu import MallocTrimmer
from deepspeed.axes import TENSOR
from deepspeed.comm.base.device import local_device
from deepspeed.comm.job import groups
from deepspeed.engine import DeepSpeedEngine, initialize
from deepspeed.errors import DeepSpeedConfigError, NotYetSupportedError
from deepspeed.inference.checkpoints import fill
from deepspeed.inference.config import InferenceSettings, read_settings
from deepspeed.inference.engine import InferenceEngine
from deepspeed.inference.tensor import check_policy, cut, job_mesh, save, tensor_size
from deepspeed.linear.parts import check_parts, quantize_parts
from deepspeed.linear.quantize import quantize_model
from deepspeed.logging import log_dist
from deepspeed.models.layers import keep_rotary_frequencies
from deepspeed.release import info_line
from deepspeed.zero.construction.reading import SlicesFromFiles


def init_inference(model: nn.Module, config: Any = None, **kwargs: Any) -> InferenceEngine:
    """Prepares a model for generation: dtype, quantized weights, device, ZeRO-Inference.

    The model keeps its own modules and so its results. Only linear layers of few bits (``dtype=int8``) and layers that
    tensor-parallel ranks share are replaced. Every rank must call it.

    Args:
        model: Any module. One on the meta device is filled from ``checkpoint``.
        config: A dict or a path to a JSON file with the keys of docs/reference/config.md, "Inference".

    Raises:
        DeepSpeedConfigError: The configuration cannot be used; lists every problem.
        NotYetSupportedError: A setting requests a feature that this release does not have.
        CheckpointError: The files of ``checkpoint`` cannot be read or do not fit, or the weights cannot be written.
    """
    if not isinstance(model, nn.Module):
        raise DeepSpeedConfigError(
            f"init_inference(model=...): expected a torch.nn.Module, found {model!r}; pass the model"
        )
    if isinstance(model, (InferenceEngine, DeepSpeedEngine)):
        raise DeepSpeedConfigError(
            f"init_inference(model=...): expected a model, found a {type(model).__name__}; pass its attribute module"
        )
    settings = read_settings(config, kwargs)
    _refuse(settings)
    check_policy(model, settings)
    check_parts(model, settings.parts)
    if settings.zero is None:  # else the training engine below logs it
        log_dist(info_line())
    for line in settings.notices:
        log_dist(f"init_inference: {line}", ranks=[0])
    read = settings.config
    if settings.checkpoint is None:
        _refuse_meta(model)
    if settings.zero is not None:
        return _with_zero(model, settings)
    before = sum(parameter.nbytes for parameter in model.parameters())
    device = torch.device("cpu") if read.keep_module_on_host else local_device()
    mesh = job_mesh(settings)
    cut_result = None if mesh is None else cut(model, settings, mesh, device)
    _fill(model, settings)  # after the cut, so that a rank reads its parts only
    with keep_rotary_frequencies(model):
        model.eval().requires_grad_(False).to(settings.dtype)
    if settings.save_path is not None:
        save(model, settings.save_path, cut_result, settings.dtype)
    _quantize(model, settings)
    model.to(device)
    MallocTrimmer().note(before, 0)  # returns the memory of the weights before the cast
    return InferenceEngine(model, settings, mp_group=None if mesh is None else groups.group_along(TENSOR))


def default_inference_config() -> dict[str, Any]:
    """Returns the configuration with every key at its default, as a dict."""
    return read_settings(None, {}).config.model_dump()


def _fill(model: nn.Module, settings: InferenceSettings, slices: SlicesFromFiles | None = None) -> None:
    if settings.checkpoint is not None:
        read = settings.config
        base = read.base_dir or read.checkpoint_config.base_dir
        fill(model, settings.checkpoint, settings.dtype, base_dir=base, slices=slices)
        _refuse_meta(model)


def _quantize(model: nn.Module, settings: InferenceSettings) -> None:
    if settings.weight_bits is not None:
        log_dist(f"init_inference: {quantize_model(model, bits=settings.weight_bits).line()}", ranks=[0])
    elif settings.parts:
        for report in quantize_parts(model, settings.parts):
            log_dist(f"init_inference: {report.line()}", ranks=[0])


def _with_zero(model: nn.Module, settings: InferenceSettings) -> InferenceEngine:
    """Prepares ZeRO-Inference: weights are sharded or offloaded, and gathered layer by layer. Every rank must call."""
    assert settings.zero is not None
    before = sum(parameter.nbytes for parameter in model.parameters() if not parameter.is_meta)
    zero = _drop_useless_offload(settings.zero)
    slices = None
    if settings.checkpoint is not None and any(parameter.is_meta for parameter in model.parameters()):
        slices = SlicesFromFiles(settings.dtype, on_host="offload_param" in zero)
    _fill(model, settings, slices if slices is not None and slices.ranks > 1 else None)
    model.eval().requires_grad_(False)
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    if settings.dtype != torch.float32:
        config["fp16" if settings.dtype == torch.float16 else "bf16"] = {"enabled": True}
    with keep_rotary_frequencies(model):
        if slices is None or slices.ranks == 1:
            model.to(settings.dtype)
        _quantize(model, settings)
        engine = initialize(model=model, config=config)[0]
    engine.eval()
    MallocTrimmer().note(before, 0)  # as in init_inference
    return InferenceEngine(engine.module, settings, runner=engine)


def _drop_useless_offload(zero: dict[str, Any]) -> dict[str, Any]:
    """Returns the section without offload to the host if the model computes in host memory anyway."""
    offload = zero.get("offload_param")
    device = offload.get("device") if isinstance(offload, dict) else None
    if device != "cpu" or get_accelerator().device_name() != "cpu":
        return zero
    log_dist("init_inference: zero.offload_param has no effect: the model computes in host memory", ranks=[0])
    return {name: value for name, value in zero.items() if name != "offload_param"}


def _refuse(settings: InferenceSettings) -> None:
    read = settings.config
    if settings.save_path is not None and settings.zero is not None:
        raise DeepSpeedConfigError(
            "init_inference: save_mp_checkpoint_path cannot be combined with zero; weights that ZeRO shards are "
            "written by save_16bit_model of the engine that deepspeed.initialize returns"
        )
    if settings.zero is not None and tensor_size(settings) > 1:
        raise NotYetSupportedError(
            "init_inference: zero cannot be combined with tensor_parallel.tp_size > 1; for both, give "
            "deepspeed.initialize a configuration with tensor_parallel.autotp_size and ZeRO stage 3, without an "
            "optimizer"
        )
    if read.enable_cuda_graph and get_accelerator().device_name() == "cpu":
        log_dist("init_inference: enable_cuda_graph has no effect without a GPU", ranks=[0])
    elif read.enable_cuda_graph:
        if settings.zero is not None or tensor_size(settings) > 1:
            raise DeepSpeedConfigError(
                "init_inference: enable_cuda_graph cannot be combined with zero or tensor_parallel.tp_size > "
                "1: communication between ranks or with host memory cannot be captured; leave the key out"
            )
        log_dist(
            "init_inference: enable_cuda_graph: generate keeps a static cache, whose steps Transformers compiles and "
            "captures; forward runs as it is (engine.compile captures it with mode='reduce-overhead')",
            ranks=[0],
        )
    if read.injection_policy is not None and read.replace_with_kernel_inject:
        raise DeepSpeedConfigError(
            "init_inference: injection_policy cannot be combined with replace_with_kernel_inject, as the first cuts "
            "the layers and the second replaces them; give one of them"
        )


def _refuse_meta(model: nn.Module) -> None:
    empty = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if empty:
        raise DeepSpeedConfigError(
            f"init_inference: {len(empty)} parameters are on the meta device, such as {empty[0]!r}; pass "
            "checkpoint=..., a folder or a description of the files with their values"
        )
