"""Loads files into a Transformers model whose parameters ``zero.Init`` has sharded.

Rank 0 runs the loader that the library uses at other stages. Where that loader would set a tensor of the model, rank 0
collects it, and all ranks put the collected tensors into their shards, some MiB at a time. Every stage therefore loads
the same values. What rank 0 finds wrong is an error on every rank, before any rank waits for one that has left.

The rest of this module supports what transformers does with models that are built for ZeRO stage 3.

After ``from_config`` and ``from_pretrained`` have built a model under ``zero.Init``, transformers passes over all of it
to give weights their first values. The pass of a model that is not sharded is right as it is, if every rank runs it and
a weight is full when the pass reaches it; this module ensures both. The variant that transformers has for ZeRO stage 3
gathers a module's own weights (in newer versions its children's too) and lets only rank 0 run the model's code. It
cannot serve code that writes to weights further down, and buffers that the code fills stay empty on the other ranks.
Tying weights is such a pass too: it makes the bias of a head as long as the weight that the head gets.

The passes leave some weights to the constructors, such as the two of a convolution under ``weight_norm``. All the same
``from_config`` switches torch's initializers off when ZeRO stage 3 is on, and these weights would be uninitialized
memory; so the initializers are switched on again. ``from_pretrained`` has the values in its files.

Files are loaded by :mod:`deepspeed.zero.construction.model_files`.

Only these passes are served. Other code that touches a sharded weight is refused as everywhere.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from deepspeed import comm
from deepspeed.comm.base.device import local_device
from deepspeed.comm.job.job import axis_of
from deepspeed.comm.transports.objects import gather_objects
from deepspeed.errors import CheckpointError
from deepspeed.models.construction import hide_stage_3, wrap_passes
from deepspeed.models.layers import mark_initialized
from deepspeed.models.loading import empty_record, find_unlikely, redirect_tensors, wrap_loading
from deepspeed.zero.access.gathered import GatheredParameters, with_addresses
from deepspeed.zero.address import showing_wholes
from deepspeed.zero.construction.modules import serving_all_ranks
from deepspeed.zero.storage import broadcast_values, distinct

_ROUND_BYTES = 32 * 2**20
_LISTED = 8  # tensors that a message names


def load_files(model: nn.Module, load_config: Any, original: Callable[[], Any]) -> Any:
    """Loads files into a model at stage 3; every rank must call it.

    Args:
        original: Loads as at other stages, into parameters that are whole.

    Returns:
        The library's record of the loading, equal on all ranks, and None.

    Raises:
        CheckpointError: On every rank: the files cannot be read or converted, or tensors have another shape than the
            model's, or tensors of its blocks are missing.
    """
    loading = _Loading(model)
    info = loading.lead(original, load_config) if comm.get_rank() == 0 else loading.follow(load_config)
    _refuse_misfits(model, load_config, info, loading.loaded)
    return info, None


class _Loading:
    """Loads files into one model, on one rank: rank 0 calls :meth:`lead`, the others :meth:`follow`."""

    def __init__(self, model: nn.Module) -> None:
        self.loaded: list[str] = []  # names of the tensors that got values
        self._model = model
        ranks, timeout = axis_of(None), comm.default_timeout()
        self._messages = ranks.objects(patience=timeout, why="loading of weights")
        self._transport = ranks.transport("outside engines", device=local_device(), timeout=timeout)
        self._values: dict[str, torch.Tensor] = {}
        self._bytes = 0

    def lead(self, original: Callable[[], Any], load_config: Any) -> Any:
        """Loads on rank 0 and sends every tensor. Returns the library's record."""
        try:
            with hide_stage_3(), showing_wholes(), redirect_tensors(self._collect):
                info, _ = original()
            self._send()
        except Exception as error:
            self._announce({"error": f"{type(error).__name__}: {error}"})
            raise
        used = getattr(self._model, "_weight_conversions", None) or []
        mapping = list(load_config.weight_mapping or [])
        indices = [index for index, rule in enumerate(mapping) if any(rule is one for one in used)]
        self._announce({"record": vars(info), "conversions": indices})
        return info

    def follow(self, load_config: Any) -> Any:
        """Receives on another rank what rank 0 sends. Returns rank 0's record."""
        while "names" in (message := self._announce(None)):
            self._fill(message["names"], None)
        if "error" in message:
            raise CheckpointError(f"from_pretrained at ZeRO stage 3: rank 0 could not load. {message['error']}")
        mapping = list(load_config.weight_mapping or [])
        conversions = [mapping[index] for index in message["conversions"]]
        self._model._weight_conversions = conversions  # type: ignore[assignment]
        info = empty_record()
        for name, value in message["record"].items():
            setattr(info, name, value)
        return info

    def _collect(self, name: str, value: torch.Tensor, info: Any) -> None:
        target = _tensor_of(self._model, name)
        if target is None:
            info.unexpected_keys.add(name)
            return
        info.missing_keys.discard(name)
        shape = torch.Size(getattr(target, "ds_shape", target.shape))
        if value.shape != shape:
            info.mismatched_keys.add((name, value.shape, shape))
            return
        self._values[name] = value
        self._bytes += value.nbytes
        if self._bytes >= _ROUND_BYTES:
            self._send()

    def _send(self) -> None:
        if self._values:
            self._announce({"names": list(self._values)})
            self._fill(list(self._values), list(self._values.values()))
        self._values, self._bytes = {}, 0

    def _fill(self, names: list[str], values: list[torch.Tensor] | None) -> None:
        """Puts tensors into shards and buffers, and marks them, so that the library does not initialize them."""
        targets: list[torch.Tensor] = []
        for name in names:
            target = _tensor_of(self._model, name)
            assert target is not None
            targets.append(target)
        sharded = {id(parameter) for parameter, _ in with_addresses(targets)}
        with torch.no_grad(), GatheredParameters(targets, modifier_rank=0):
            for target, value in zip(targets, values or (), strict=values is not None):
                own = distinct(target)
                own.copy_(value[tuple(slice(size) for size in own.shape)])
        for target in targets:
            mark_initialized(target)
            if id(target) not in sharded:
                broadcast_values(target.data, self._transport, label="a buffer of the weights of rank 0")
        self.loaded += names

    def _announce(self, message: dict[str, Any] | None) -> dict[str, Any]:
        """Returns rank 0's message on every rank; the others give None. All ranks must call it."""
        announced: dict[str, Any] = gather_objects(self._messages, message, label="the loading of weights")[0]
        return announced


def _tensor_of(model: nn.Module, name: str) -> torch.Tensor | None:
    path, _, leaf = name.rpartition(".")
    found: torch.Tensor | None = getattr(model.get_submodule(path), leaf)
    return found


def _refuse_misfits(model: Any, load_config: Any, info: Any, loaded: list[str]) -> None:
    source = f"from_pretrained({str(load_config.pretrained_model_name_or_path)!r})"
    if info.conversion_errors:
        # the last two lines of a record that begins with a traceback: what failed, and why
        reasons = {name: " ".join(error.strip().splitlines()[-2:]) for name, error in info.conversion_errors.items()}
        raise CheckpointError(
            f"{source}: the files could not be converted for {type(model).__name__}: "
            f"{_list([f'{name}: {reason}' for name, reason in reasons.items()])}"
        )
    if load_config.ignore_mismatched_sizes:
        return
    if info.mismatched_keys:
        wrong = [f"{name} is {tuple(found)} in the files and {tuple(want)} in the model"
                 for name, found, want in sorted(info.mismatched_keys)]  # fmt: skip
        raise CheckpointError(
            f"{source}: tensors have another shape than {type(model).__name__} has: {_list(wrong)}. Take the "
            "configuration that the files were saved with, or pass ignore_mismatched_sizes=True to initialize them"
        )
    unlikely = find_unlikely(model, info.missing_keys, info.unexpected_keys, loaded)
    if unlikely:
        more = f" The files have {_list(sorted(info.unexpected_keys))}, which the model does not take."
        raise CheckpointError(
            f"{source}: {len(unlikely)} tensors of the blocks of {type(model).__name__} are not in the files: "
            f"{_list(unlikely)}.{more if info.unexpected_keys else ''} Take the class and the configuration that the "
            "files were saved with, or pass ignore_mismatched_sizes=True to initialize them"
        )


def _list(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return "; ".join(names[:_LISTED]) + more


def serve_passes() -> None:
    """Patches transformers, if it is imported, so that its passes find full weights. May be called again."""
    wrap_passes(_served)
    wrap_loading(load_files)


def _served(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def serve(*args: Any, **kwargs: Any) -> Any:
        with serving_all_ranks(), hide_stage_3():
            return original(*args, **kwargs)

    return serve
