"""Detects models that are trained on parts of sequences without exchanging tokens between ranks."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed.comm.base.torch_groups import counts_sends, groups_within, operations_of
from deepspeed.comm.job.job import Job
from deepspeed.comm.transports.transport import Transport
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.logging import log_dist
from deepspeed.parallel.sequence.exchange import uses_of_transports
from deepspeed.uncompiled import uncompiled

_ATTENTION = (functional.scaled_dot_product_attention, functional.multi_head_attention_forward)
_P2P = (torch.ops.c10d.send.default, torch.ops.c10d.recv_.default, torch.ops.c10d.recv_any_source_.default)
_SOFTMAX = (functional.softmax, torch.softmax, torch.Tensor.softmax)


def check_first_forward(job: Job, model: nn.Module, group: Any, ranks: int) -> None:
    """Makes a user's model check in its first forward that it exchanges tokens with the ``ranks`` of a group.

    The forward raises ``DeepSpeedConfigError`` if the model attends without an exchange: each rank would attend to its
    own part. It warns if it sees neither: that is right only for token-wise models.
    """
    if not job.ranks.is_initialized() or job.watched.of(group) is None:  # no ranks to exchange tokens with
        return
    _FirstForward(job, model, group, ranks)


class _FirstForward:
    """Observes one forward between two hooks."""

    def __init__(self, job: Job, model: nn.Module, group: Any, ranks: int) -> None:
        self._job, self._members, self._ranks = job, job.ranks.ranks_of(group), ranks
        self._seen: _Attention | None = None
        self._sent = _P2PCounter(self._members)
        self._before: tuple[int, int | None] = (0, None)
        self._kept_alive: list[Any] = []
        self._handles = [
            model.register_forward_pre_hook(self._begin),
            model.register_forward_hook(self._end, always_call=True),
        ]

    @uncompiled
    def _begin(self, model: nn.Module, _args: Any) -> None:
        if self._seen is not None:
            return
        # The count of a transport that is collected during the forward would be missing in the second result.
        self._kept_alive = list(self._job.watched.watch.members)
        self._before = self._counts()
        self._seen = _Attention()
        if all(module._compiled_call_impl is None for module in model.modules()):
            self._seen.__enter__()
            self._sent.__enter__()
            self._seen.is_entered = True

    @uncompiled
    def _end(self, model: nn.Module, _args: Any, result: Any) -> None:
        for handle in self._handles:
            handle.remove()
        seen = self._seen
        if seen is None:
            return
        if seen.is_entered:
            self._sent.__exit__(None, None, None)
            seen.__exit__(None, None, None)
        uses, calls = self._counts()
        self._kept_alive.clear()
        uses_before, calls_before = self._before
        has_counted = calls is not None and calls_before is not None
        by_program = calls - calls_before if calls is not None and calls_before is not None else 0
        if result is None or uses > uses_before or by_program > 0 or self._sent.count:
            return  # a forward that failed returns None
        what = (
            f"sequence_parallel_size {self._ranks}: expected {type(model).__name__} to exchange tokens with the ranks "
            "that have the other parts of its sequences; "
        )
        remedy = (
            "Build deepspeed.sequence.layer.DistributedAttention (or deepspeed.sequence.ring_attention) into its "
            "attention, or set sequence_parallel_size to 1"
        )
        if seen.count and has_counted:
            raise DeepSpeedConfigError(
                f"{what}its first forward attended {seen.count} time(s) and exchanged nothing, so each rank would "
                f"attend to its own part only. {remedy}"
            )
        log_dist(
            f"{what}no exchange was found in its first forward. That is right only if it treats every token by itself, "
            f"or exchanges tokens in a way that torch does not count. {remedy}",
            level=logging.WARNING,
        )

    def _counts(self) -> tuple[int, int | None]:
        """Returns the exchanges by ``deepspeed.sequence``, and by calls of the program; None: torch does not count."""
        return uses_of_transports(), program_calls(self._job, self._members)


class _Attention(TorchFunctionMode):
    """Counts calls of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.is_entered = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        scores = args[0] if func in _SOFTMAX and args else None
        is_square = isinstance(scores, torch.Tensor) and scores.dim() > 2 and scores.size(-1) == scores.size(-2)
        if func in _ATTENTION or is_square:  # a softmax of scores of tokens by tokens: [..., tokens, tokens]
            self.count += 1
        return func(*args, **(kwargs or {}))


class _P2PCounter(TorchDispatchMode):
    """Counts sends and recvs in groups of ``members`` only that :func:`program_calls` does not count."""

    def __init__(self, members: Collection[int]) -> None:
        super().__init__()
        self._members = set(members)
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _P2P:
            group = dist.ProcessGroup.unbox(next(arg for arg in args if isinstance(arg, torch.ScriptObject)))
            if not counts_sends(group, args[0][0].device):
                self.count += set(dist.get_process_group_ranks(group)) <= self._members
        return func(*args, **(kwargs or {}))


def program_calls(job: Job, ranks: Collection[int]) -> int | None:
    """Returns how many collectives, sends and recvs the program has started among ``ranks`` so far, in this process.

    Groups that also have other ranks do not count. Calls of ``torch.distributed`` and of ``deepspeed.comm`` do;
    transfers of a :class:`Transport` do not. Only differences between results are meaningful. None: the backend of a
    group does not count (on NCCL torch counts no sends and recvs). There must be a process group.
    """
    transports = [member for member in list(job.watched.watch.members) if isinstance(member, Transport)]
    total = 0
    for group in groups_within(ranks):
        counted = operations_of(group)
        if counted is None:
            return None
        total += counted - sum(transport.started for transport in transports if transport.group is group)
    return total
