"""Builds the model to be planned on torch's ``meta`` device, and a batch for it."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deepspeed.errors import DeepSpeedConfigError, DeepSpeedError
from deepspeed.models import building
from deepspeed.models.configurations import architecture_of, attends_across_sequences, decoder_sizes_of
from deepspeed.models.inputs import image_shape_of, spectrum_shape_of
from deepspeed.nested import map_tensors, tensors_of
from deepspeed.parallel.pipe import transformers_models
from deepspeed.plan.decoder import Decoder, DecoderShape, layers_of, token_loss
from deepspeed.plan.memory import META
from deepspeed.zero.address import full_shape

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of the model's forward."""


@dataclass(frozen=True)
class Workload:
    """A model on ``meta`` and the inputs of its forward."""

    model: nn.Module  # the model; used up by one simulation
    inputs: Callable[[int, int], Inputs]  # makes the arguments of forward from micro-batch and sequence length


@dataclass(frozen=True)
class LayerRow:
    """A model as a list of layers, which can be divided into pipeline stages."""

    # makes the layers, as in ``PipelineModule``; called with ``meta`` as torch's device
    layers: Callable[[], list[Any]]
    loss_fn: Callable[[Any, Any], Any]  # ``loss_fn(outputs, labels)``
    items: Callable[[int, int], tuple[Any, Any]]  # makes ``(inputs, labels)`` from micro-batch and sequence length


@dataclass(frozen=True)
class ModelSource:
    """Builds workloads of one model."""

    name: str  # for headlines
    build: Callable[[], Workload]  # makes a fresh workload
    # returns the model as a list of layers; None if it cannot be divided into stages here
    find_row: Callable[[], LayerRow | None] = lambda: None
    # returns the same model with experts spread over the given number of ranks; None: the model's layers or the
    # configuration (``expert_parallel``) decide
    spread: Callable[[int], ModelSource] | None = None

    def in_row(self) -> LayerRow:
        """Returns the model as a list of layers; raises DeepSpeedConfigError where it cannot be divided."""
        row = self.find_row()
        if row is None:
            raise DeepSpeedConfigError(
                f"plan: {self.name} cannot be cut into stages here; give a decoder by its sizes (--layers, --hidden, "
                "--heads, --vocab) or a decoder-only model of Transformers (its configuration, or the model), without "
                "inputs of its own, or plan without pipe"
            )
        return row


def model_source(given: Any, inputs: Any = None) -> ModelSource:
    """Returns the source that ``given`` names.

    Args:
        given: A module (left unchanged: a copy without values is planned), a callable that returns one or a pair
            ``(model, inputs)``, ``"module:callable"``, a folder or JSON file with a transformers configuration, such a
            configuration object, or a :class:`DecoderShape`.
        inputs: What forward gets: a callable of ``(micro_batch, sequence_length)``, or what it would return (a tensor,
            a tuple of positional arguments, or a dict of keyword arguments). None: token ids and labels.

    Raises:
        DeepSpeedConfigError: ``given`` is none of these, or cannot be built on ``meta``.
    """
    if isinstance(given, DecoderShape):
        return _decoder_source(given, inputs)
    if isinstance(given, nn.Module):
        made = _built(type(given).__name__, lambda: without_values(given), inputs)
        return replace(made, find_row=lambda: _row_of_model(given, inputs))
    path = Path(given) if isinstance(given, (str, Path)) else None
    if building.is_configuration(given) or (path is not None and (path.suffix == ".json" or path.is_dir())):
        return _from_transformers(given, inputs)
    if isinstance(given, str) and ":" in given:
        make = _find_callable(given)
        _refuse_arguments(given, make)
        return _from_callable(given, make, inputs)
    if callable(given):
        name = getattr(given, "__name__", "model")
        _refuse_arguments(name, given)
        return _from_callable(name, given, inputs)
    raise DeepSpeedConfigError(
        f"plan(model=...): expected a torch.nn.Module, a callable, 'module:callable', or a folder or JSON file with a "
        f"transformers configuration; found {given!r}"
    )


def _from_callable(name: str, make: Callable[[], Any], inputs: Any) -> ModelSource:
    return replace(_built(name, make, inputs), find_row=lambda: _row_of_model(_made(name, make), inputs))


def _built(name: str, make: Callable[[], Any], inputs: Any) -> ModelSource:
    def build() -> Workload:
        made = _made(name, make)
        model, own_inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
        if not isinstance(model, nn.Module):
            found = f"a tuple of {len(made)}" if isinstance(made, tuple) else type(model).__name__
            raise DeepSpeedConfigError(
                f"{name}: expected a torch.nn.Module or a pair (model, inputs) to be returned, found {found}"
            )
        on_real = [n for n, p in model.named_parameters() if p.device.type != "meta"]
        if on_real:
            model = without_values(model)
        return Workload(model, functools.partial(_arguments, model, inputs if inputs is not None else own_inputs))

    return ModelSource(name, build)


def _made(name: str, make: Callable[[], Any]) -> Any:
    """Returns what ``make`` returns on ``meta``, or raises DeepSpeedConfigError."""
    try:
        with torch.device(META):
            return make()
    except DeepSpeedError:
        raise
    except (Exception, SystemExit) as error:
        raise DeepSpeedConfigError(_why_not_built(name, error)) from error


def _why_not_built(name: str, error: BaseException) -> str:
    reason = f"{type(error).__name__}: {str(error).rstrip('.')}"
    if "meta" not in str(error):
        return f"{name} cannot be built: {reason}. Nothing was planned; correct the code that builds the model"
    return (
        f"{name} cannot be built on torch's meta device, where tensors have shapes and no values: {reason}. Keep work "
        "on values (loading weights, .item(), numpy) out of its construction, or give the sizes instead (--layers, "
        "--hidden, --heads, --vocab)"
    )


def without_values(model: nn.Module) -> nn.Module:
    """Returns a copy of a model whose parameters and buffers are on ``meta``; nothing of its size is allocated."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        made = nn.Parameter(
            torch.empty(full_shape(parameter), dtype=parameter.dtype, device=META),
            requires_grad=parameter.requires_grad,
        )
        memo[id(parameter)] = made
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype, device=META)
    return copy.deepcopy(model, memo)


def _find_callable(path: str) -> Callable[[], Any]:
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise DeepSpeedConfigError(f"model {path!r}: expected module:callable, such as package.models:make_model")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # whatever the module's own code raises
        raise DeepSpeedConfigError(
            f"model {path!r}: module {module_name!r} cannot be imported ({type(error).__name__}: {error}); call from "
            "the folder that holds it, or set PYTHONPATH"
        ) from error
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise DeepSpeedConfigError(f"model {path!r}: {module_name} has no callable {name!r}; correct the name")
    return found


def _refuse_arguments(name: str, make: Callable[[], Any]) -> None:
    try:
        parameters = inspect.signature(make).parameters.values()
    except ValueError:  # a builtin without a signature
        return
    open_ended = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in open_ended]
    if needed:
        raise DeepSpeedConfigError(
            f"model {name}: expected a callable without arguments, found one that needs {', '.join(needed)}; give a "
            "function that fills them in and returns the model, or (model, inputs)"
        )


def _decoder_source(shape: DecoderShape, inputs: Any) -> ModelSource:
    experts = f" of {shape.experts} experts, {shape.experts_per_token} per token" if shape.experts else ""
    made = _built(f"decoder of {shape.layers} layers{experts}", lambda: Decoder(shape), inputs)
    if shape.experts:
        made = replace(made, spread=lambda ep: _decoder_source(replace(shape, expert_ranks=ep), inputs))
    row = LayerRow(functools.partial(layers_of, shape), token_loss, _tokens_and_labels)
    return made if inputs is not None else replace(made, find_row=lambda: row)


def _tokens_and_labels(micro_batch: int, sequence_length: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.zeros(micro_batch, sequence_length, dtype=torch.int64, device=META)
    return tokens, torch.zeros_like(tokens)


@dataclass(frozen=True)
class ModelSizes:
    """A decoder by its sizes, and how well they describe the model they come from."""

    name: str  # for headlines
    shape: DecoderShape
    parameters: int  # of the model itself
    note: str = ""  # what the sizes leave out


def model_sizes(given: Any) -> ModelSizes:
    """Returns the sizes of a decoder, given as such or by its transformers configuration.

    Raises:
        DeepSpeedConfigError: The configuration is not one of a decoder, or lacks sizes.
    """
    if isinstance(given, DecoderShape):
        return ModelSizes(f"decoder of {given.layers} layers", given, given.parameters)
    if isinstance(given, str) and not Path(given).exists():
        raise DeepSpeedConfigError(
            f"{given}: there is no such folder or file, and names on the hub are not looked up; fetch the model's "
            "config.json and give its folder, or give the sizes (--layers --hidden --heads --vocab)"
        )
    config = _configuration_of(given)
    source = _from_transformers(config, None)
    sizes: dict[str, Any] = dict(decoder_sizes_of(config))
    missing = [name for name in ("layers", "hidden", "heads", "vocab") if name not in sizes]
    if missing or attends_across_sequences(config):
        why = f"it lacks a single number of {', '.join(missing)}" if missing else "it has an encoder and a decoder"
        raise DeepSpeedConfigError(
            f"{source.name}: expected the configuration of a decoder, found that {why}; give sizes of a similar "
            "decoder (--layers --hidden --heads --vocab), or plan it without --gpus"
        )
    parameters = sum(p.numel() for p in source.build().model.parameters())
    shapes = [DecoderShape(**sizes, is_gated=is_gated) for is_gated in (True, False)]
    shape = min(shapes, key=lambda one: abs(one.parameters - parameters))
    off = shape.parameters / parameters - 1
    note = (
        f"Its sizes give {shape.parameters / 1e9:,.3g}B parameters ({off:+.0%}): layers of other kinds and tied "
        "weights are not described by them, so times and memory are off by about as much."
    )
    return ModelSizes(source.name, shape, parameters, note if abs(off) > _CLOSE else "")


_CLOSE = 0.03
"""Relative difference of parameters that needs no note."""


# -- transformers ------------------------------------------------------------------------------------------------------


def _configuration_of(given: Any) -> Any:
    """Returns a transformers configuration, or the one in a folder or file."""
    if not building.has_library():
        raise DeepSpeedConfigError(
            "a transformers configuration needs the package transformers; install it, or give the sizes instead "
            "(--layers, --hidden, --heads, --vocab)"
        )
    return given if building.is_configuration(given) else _read_transformers(Path(given))


def _from_transformers(given: Any, inputs: Any) -> ModelSource:
    config = _configuration_of(given)
    architecture = architecture_of(config)
    cls = building.class_named(architecture) if architecture else None
    if architecture and cls is None:
        raise DeepSpeedConfigError(
            f"{config.model_type} configuration: architectures names {architecture}, which transformers "
            f"{building.library_version()} does not have; correct the name, install the version that has it, or give "
            "module:callable that makes the model"
        )

    def make() -> nn.Module:
        made: nn.Module = building.build(copy.deepcopy(config), cls)
        return made

    made = _built(f"{config.model_type} configuration", make, inputs)
    row = _row_of_transformers(lambda: copy.deepcopy(config))
    return made if inputs is not None else replace(made, find_row=lambda: row)


def _row_of_model(model: Any, inputs: Any) -> LayerRow | None:
    """Returns the layers of a module, if it is a model of Transformers with its usual inputs."""
    if inputs is not None or not building.is_configuration(getattr(model, "config", None)):
        return None
    return _row_of_transformers(lambda: without_values(model))


def _row_of_transformers(make: Callable[[], Any]) -> LayerRow:
    loss_fn = transformers_models.next_token_loss
    return LayerRow(lambda: transformers_models.layers_of(make()), loss_fn, _tokens_and_labels)


def _read_transformers(path: Path) -> Any:
    path = path / "config.json" if path.is_dir() else path
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(facts, dict):
            raise ValueError(f"a {type(facts).__name__}")
        return building.described_configuration(facts.pop("model_type"), **facts)
    except Exception as error:  # the library checks fields with exceptions of its own
        reason = " ".join(str(error).split())  # its messages have several lines
        # For an unknown model_type the message lists all types.
        reason = reason if len(reason) <= 200 else reason[:200] + "..."
        raise DeepSpeedConfigError(
            f"{path}: expected a transformers configuration (JSON with model_type); found {type(error).__name__}: "
            f"{reason}"
        ) from error


# -- inputs ------------------------------------------------------------------------------------------------------------


def _arguments(model: nn.Module, inputs: Any, micro_batch: int, sequence_length: int) -> Inputs:
    """Returns the arguments of forward, on ``meta``."""
    try:
        with torch.device(META):
            made = inputs(micro_batch, sequence_length) if callable(inputs) else inputs
            if made is None:
                made = _usual_inputs(model, micro_batch, sequence_length)
    except DeepSpeedError:
        raise
    except Exception as error:
        raise DeepSpeedConfigError(
            f"plan: the inputs for micro-batch {micro_batch} and sequences of {sequence_length} tokens cannot be made: "
            f"{type(error).__name__}: {error}. Choose smaller sizes, or give inputs that can be made without values"
        ) from error
    if isinstance(made, torch.Tensor):
        made = (made,)
    if not isinstance(made, (tuple, Mapping)) or not any(True for _ in tensors_of(made)):
        raise DeepSpeedConfigError(
            f"plan(inputs=...): expected a tensor, a tuple of positional or a dict of keyword arguments with tensors; "
            f"found {type(made).__name__}"
        )
    moved = map_tensors(dict(made) if isinstance(made, Mapping) else made, lambda tensor: tensor.to(META))
    return ((), moved) if isinstance(moved, dict) else (moved, {})


def _usual_inputs(model: nn.Module, micro_batch: int, sequence_length: int) -> dict[str, Any]:
    """Returns token ids and labels; for models of transformers also images or spectra, as their configuration says."""
    accepted = inspect.signature(model.forward).parameters
    config: Any = getattr(model, "config", None)
    made: dict[str, Any] = {}
    if "input_ids" in accepted:
        made["input_ids"] = torch.zeros(micro_batch, sequence_length, dtype=torch.int64, device=META)
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    image, spectrum = image_shape_of(config), spectrum_shape_of(config)
    if "pixel_values" in accepted and image is not None:
        made["pixel_values"] = torch.zeros((micro_batch, *image), dtype=dtype, device=META)
    if "input_features" in accepted and spectrum is not None:
        made["input_features"] = torch.zeros((micro_batch, *spectrum), dtype=dtype, device=META)
    is_sequence = "input_ids" in made or "input_features" in made
    if "labels" in accepted:
        shape = (micro_batch, sequence_length) if is_sequence else (micro_batch,)
        made["labels"] = torch.zeros(shape, dtype=torch.int64, device=META)
    if "return_loss" in accepted:
        made["return_loss"] = True
    if len(made) < 2 or not {"labels", "return_loss"} & made.keys():
        raise DeepSpeedConfigError(
            f"{type(model).__name__}.forward takes ({', '.join(accepted)}), not input_ids and labels; pass what it "
            "gets: plan(inputs=...), or let the callable that makes the model return (model, inputs)"
        )
    if "use_cache" in accepted:
        made["use_cache"] = False
    return made
