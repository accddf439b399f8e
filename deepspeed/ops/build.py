"""Builds the optimizer of a config section: one of this package, or a class of ``torch.optim``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from deepspeed.config.suggest import did_you_mean
from deepspeed.errors import DeepSpeedConfigError, NotYetSupportedError
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam

#: Names that are accepted in any case, in the spelling of messages.
_OWN_NAMES = ("Adam", "AdamW", "Adagrad", "Lamb", "Lion", "Muon", "OneBitAdam", "OneBitLamb", "SGD", "ZeroOneAdam")
DEEPSPEED_OPTIMIZERS = [name.lower() for name in _OWN_NAMES]
"""Names of this package's optimizers in lower case."""
ADAGRAD_OPTIMIZER, ADAM_OPTIMIZER, ADAMW_OPTIMIZER, LAMB_OPTIMIZER = "adagrad", "adam", "adamw", "lamb"
LION_OPTIMIZER, MUON_OPTIMIZER, ONEBIT_ADAM_OPTIMIZER = "lion", "muon", "onebitadam"
ONEBIT_LAMB_OPTIMIZER, ZERO_ONE_ADAM_OPTIMIZER = "onebitlamb", "zerooneadam"
TORCH_ADAM_PARAM, ADAM_W_MODE = "torch_adam", "adam_w_mode"  # keys of optimizer.params
MUADAM_OPTIMIZER, MUADAMW_OPTIMIZER, MUSGD_OPTIMIZER = "muadam", "muadamw", "musgd"

#: Known names without an implementation, and what to use instead.
_MISSING = {
    "MuAdam": "Adam with a learning rate per param group",
    "MuAdamW": "AdamW with a learning rate per param group",
    "MuSGD": "SGD with a learning rate per param group",
}

_UNUSABLE = {
    "LBFGS": "it calls a closure several times per step, and the engine has none",
    "SparseAdam": "it needs sparse gradients, and gradients are sent in flat buffers",
}

#: By class: settings that the config accepts although the class lacks them, with the value that changes nothing.
_WITHOUT_EFFECT: dict[str, dict[str, Any]] = {
    "FusedAdam": {"fp32_optimizer_states": True},
    "FusedLion": {"fp32_optimizer_states": True},
    "Adagrad": {"fp32_optimizer_states": True, "amsgrad": False},
    "DeepSpeedCPUAdam": {"set_grad_none": None},
    "DeepSpeedCPULion": {"set_grad_none": None},
    "DeepSpeedCPUAdagrad": {
        "lr_decay": 0,
        "initial_accumulator_value": 0,
        "maximize": False,
        "differentiable": False,
        "foreach": None,
        "fused": None,
    },
    "FusedLamb": {"max_grad_norm": 0},
    "OneBitAdam": {"max_grad_norm": 0, "cuda_aware": None, "comm_backend_name": None},
    "ZeroOneAdam": {"max_grad_norm": 0, "cuda_aware": None, "comm_backend_name": None},
    "OneBitLamb": {"max_grad_norm": 0, "cuda_aware": None, "comm_backend_name": None, "bias_correction": None},
}

#: Settings of :data:`_WITHOUT_EFFECT` that do not change results: any value is dropped.
_MERELY_SPEED = frozenset({"set_grad_none", "foreach", "fused", "bias_correction", "cuda_aware", "comm_backend_name"})


def build_optimizer(
    name: str,
    params: dict[str, Any],
    model_parameters: Iterable[Any],
    *,
    offload: bool = False,
    may_be_empty: bool = False,
) -> torch.optim.Optimizer:
    """Builds the optimizer ``name``.

    Args:
        name: Adam, AdamW, Adagrad, Lamb, Lion, Muon, OneBitAdam, OneBitLamb, ZeroOneAdam or SGD in any case, or a
            class of ``torch.optim`` spelt as there. Adam decouples weight decay unless ``params`` has
            ``adam_w_mode: false``; AdamW always does; ``torch_adam: true`` chooses torch's class of the same kind.
        model_parameters: Parameters or group dictionaries; groups without parameters are dropped.
        offload: Whether the optimizer's state is on the host: then the CPU variant is built if there is one.
        may_be_empty: Whether to build an optimizer with one empty group if there are no parameters; otherwise that is
            an error.

    Raises:
        DeepSpeedConfigError: The name, a parameter or a value is not supported; lists all problems.
        NotYetSupportedError: The name is known, but not implemented.
    """
    factory, arguments = _choose(name, dict(params), offload)
    problems = _problems(name, factory, arguments)
    if problems:
        raise DeepSpeedConfigError("\n".join(problems), tuple(problems))
    dropped = _WITHOUT_EFFECT.get(_class_of(factory).__name__, {})
    accepted = {
        key: tuple(value) if isinstance(value, list) else value  # betas, etas, ...: JSON has no tuples
        for key, value in arguments.items()
        if key not in dropped
    }
    try:
        groups = _without_empty_groups(model_parameters)
        return factory(groups or ([{"params": []}] if may_be_empty else []), **accepted)
    except (TypeError, ValueError) as error:
        raise DeepSpeedConfigError(f"optimizer: {name} cannot be built from {params}: {error}") from error


def _choose(name: str, arguments: dict[str, Any], offload: bool) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Returns the class for a name, and the arguments without those that select the class."""
    spelt = {spelt.lower(): spelt for spelt in (*_OWN_NAMES, *_MISSING)}.get(name.lower(), name)
    if spelt in _MISSING:
        raise NotYetSupportedError(f"optimizer.type: {spelt} is not available here; use {_MISSING[spelt]}")
    if spelt in ("Adam", "AdamW"):
        return _choose_adam(spelt, arguments, offload)
    if spelt in _OWN_NAMES:
        return _own_class(spelt, arguments, offload), arguments
    if spelt in _UNUSABLE:
        raise DeepSpeedConfigError(f"optimizer.type: {spelt} cannot be used: {_UNUSABLE[spelt]}; use AdamW")
    found = getattr(torch.optim, spelt, None)
    if isinstance(found, type) and issubclass(found, torch.optim.Optimizer) and found is not torch.optim.Optimizer:
        return found, arguments
    if "." in spelt:
        raise DeepSpeedConfigError(
            f"optimizer.type: expected a name of this package or of torch.optim, found {spelt!r}, a class of a "
            "program. Build the optimizer there, and pass it as initialize(optimizer=...)"
        )
    names = [*_OWN_NAMES, *_torch_names()]
    raise DeepSpeedConfigError(
        f"optimizer.type: {name!r} is unknown{did_you_mean(name, names)}; known are {', '.join(names)}"
    )


def _own_class(name: str, arguments: dict[str, Any], offload: bool) -> Any:
    """Returns the class for one of our names; imports only its module."""
    if name == "Adagrad":
        from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
        from deepspeed.ops.adagrad.cpu_adagrad import Adagrad

        # With differentiable, torch's own step runs, which needs the state at construction.
        on_device = torch.optim.Adagrad if arguments.get("differentiable") else Adagrad
        return DeepSpeedCPUAdagrad if offload else on_device
    if name == "Lamb":
        from deepspeed.ops.lamb import FusedLamb

        return FusedLamb
    if name == "Lion":
        from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion

        return DeepSpeedCPULion if offload else FusedLion
    if name == "Muon":
        from deepspeed.ops.muon import Muon

        return Muon
    if name == "SGD":
        return torch.optim.SGD
    from deepspeed.ops import onebit

    return getattr(onebit, name)


def _choose_adam(spelt: str, arguments: dict[str, Any], offload: bool) -> tuple[Callable[..., Any], dict[str, Any]]:
    use_torch = arguments.pop("torch_adam", False)
    decoupled = arguments.pop("adam_w_mode", True) or spelt == "AdamW"
    if use_torch:
        return (torch.optim.AdamW if decoupled else torch.optim.Adam), arguments
    if offload:
        return partial(DeepSpeedCPUAdam, adamw_mode=decoupled), arguments
    return partial(FusedAdam, adam_w_mode=decoupled), arguments


def _problems(name: str, factory: Callable[..., Any], arguments: dict[str, Any]) -> list[str]:
    cls = _class_of(factory)
    # The first argument is the parameters; the factory sets the two others.
    accepted = [key for key in list(inspect.signature(cls).parameters)[1:] if key not in ("adam_w_mode", "adamw_mode")]
    neutral = _WITHOUT_EFFECT.get(cls.__name__, {})
    problems = []
    for key, value in arguments.items():
        where = f"optimizer.params.{key}"
        if key == "lr" and value == "auto":
            problems.append(
                f'{where}: expected a number, found "auto", which nothing has filled in. Write the learning rate; '
                "Accelerate fills it in for a DummyOptim, and the Trainer always"
            )
        elif key == "max_grad_norm" and (value or key not in neutral):
            problems.append(f"{where}: {name} does not clip gradients; set gradient_clipping at the top level instead")
        elif key in neutral:
            if key not in _MERELY_SPEED and value != neutral[key]:
                problems.append(
                    f"{where}: {cls.__name__}, which is used here, has no such setting; found {value!r}. Leave it out, "
                    f"or set it to {neutral[key]!r}"
                )
        elif key not in accepted:
            problems.append(f"{where}: {name} has no such parameter{did_you_mean(key, accepted)}")
        elif key == "differentiable" and value:
            problems.append(
                f"{where}: expected false, found {value!r}: torch cannot differentiate through updates of leaves, as "
                "the parameters of an engine are; leave it out"
            )
    return problems


def _class_of(factory: Callable[..., Any]) -> Any:
    return factory.func if isinstance(factory, partial) else factory


def _without_empty_groups(model_parameters: Iterable[Any]) -> list[Any]:
    groups = []
    for entry in model_parameters:
        if isinstance(entry, dict):
            members = entry["params"]
            members = [members] if isinstance(members, torch.Tensor) else list(members)
            if not members:
                continue
            entry = {**entry, "params": members}
        groups.append(entry)
    return groups


def _torch_names() -> list[str]:
    return [
        name
        for name, cls in vars(torch.optim).items()
        if isinstance(cls, type)
        and issubclass(cls, torch.optim.Optimizer)
        and cls is not torch.optim.Optimizer
        and name not in _UNUSABLE
        and name not in _OWN_NAMES
    ]
