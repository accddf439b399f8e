"""``load_balance_coeff``: balances the loads of experts by a bias that takes part in the choice of experts only.

After each update the bias of every expert moves by the coefficient times the sign of *mean load - load* (`Wang et al.
2024 <https://arxiv.org/abs/2408.15664>`_, algorithm 1). Loads are the routes of all micro-batches of the update on all
ranks. The weights of the chosen experts come from the scores without bias.

Routers with a bias of their own keep it, in ``e_score_correction_bias`` or ``expert_bias``. Others get the buffer
``expert_bias``, and their calls of ``topk`` over the scores of all experts choose by scores plus bias.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from deepspeed.comm.transports.transport import Transport
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.give_base import give_base
from deepspeed.models.stacked_experts import BIASES
from deepspeed.parallel.expert.choice import ExpertChoice, TopK
from deepspeed.parallel.expert.spread import Spread, spread_of
from deepspeed.uncompiled import uncompiled
from deepspeed.zero.access.gathered import GatheredParameters
from deepspeed.zero.address import full_numel, full_shape

KEY = "expert_parallel.load_balance_coeff"
_BUFFER = "expert_bias"


class LoadBalancer:
    """The biases of one model's spread experts.

    Args:
        model: A model that :func:`prepare_biases` has prepared.
        coefficient: How far a bias moves after an update.
        peers: The ranks whose tokens are counted together.
    """

    def __init__(self, model: nn.Module, coefficient: float, peers: Transport) -> None:
        self._layers = [
            (state, *owner)
            for name, state in _spread_layers(model)
            if (owner := _owner_of_bias(_block_of(model, name), state)) is not None
        ]
        self._coefficient = coefficient
        self._peers = peers

    @torch.no_grad()
    def move(self, *, was_skipped: bool) -> None:
        """Moves the biases after an update, unless it was skipped; forgets the loads. Every rank must call it."""
        mine = [load for state, _, _ in self._layers for load in state.loads or ()]
        for state, _, _ in self._layers:
            state.loads = [0] * state.num_experts
        if was_skipped or not mine:
            return
        row = torch.tensor(mine, dtype=torch.int64, device=self._peers.small_device)
        loads = self._peers.gather_small(row, channel="step", label="the loads of the experts").sum(0)
        tensors = [getattr(owner, name) for _, owner, name in self._layers]
        parameters = [tensor for tensor in tensors if isinstance(tensor, nn.Parameter)]
        with GatheredParameters(parameters, modifier_rank=0):
            counts = loads.split([state.num_experts for state, _, _ in self._layers])
            for tensor, load in zip(tensors, counts, strict=True):
                sign = (load.sum() - load * len(load)).sign()
                bias = tensor.data.view(-1)[: len(load)]  # those beyond belong to no expert
                bias += (self._coefficient * sign).to(bias.device, bias.dtype)


def prepare_biases(model: nn.Module, device: torch.device) -> None:
    """Gives every layer of spread experts a bias where it has none, and begins to count loads.

    Raises:
        DeepSpeedConfigError: The router of a layer was not found.
    """
    for name, state in _spread_layers(model):
        state.loads = [0] * state.num_experts
        block = _block_of(model, name)
        own = _owner_of_bias(block, state)
        if own is None:
            router = _router_of(name, block, state)
            router.register_buffer(_BUFFER, torch.zeros(state.num_experts, dtype=torch.float32, device=device))
            give_base(router, _BiasedRouter)
        elif (buffer := own[0]._buffers.get(own[1])) is not None:
            own[0]._buffers[own[1]] = buffer.float()  # small steps would be lost in bf16


def _spread_layers(model: nn.Module) -> Iterator[tuple[str, Spread]]:
    states = ((name, spread_of(module)) for name, module in model.named_modules())
    return ((name, state) for name, state in states if state is not None)


def _block_of(model: nn.Module, name: str) -> nn.Module:
    """Returns the module that has the experts ``name`` and their router."""
    return model.get_submodule(name.rpartition(".")[0])


def _owner_of_bias(block: nn.Module, state: Spread) -> tuple[nn.Module, str] | None:
    for module in block.modules():
        for name in BIASES:
            found = getattr(module, name, None)
            if isinstance(found, torch.Tensor) and full_numel(found) >= state.num_experts:
                return module, name
    return None


def _router_of(name: str, block: nn.Module, state: Spread) -> nn.Module:
    """Returns the child of ``block`` whose weight has a row for each expert."""
    fitting: Mapping[str, nn.Module] = {
        own: child
        for own, child in block.named_children()
        if spread_of(child) is None
        and any(len(shape) == 2 and shape[0] == state.num_experts for shape in map(full_shape, child.parameters()))
    }
    named = {own: child for own, child in fitting.items() if "gate" in own or "router" in own}
    found = list((named or fitting).values())
    if len(found) != 1:
        raise DeepSpeedConfigError(
            f"{KEY}: expected one router beside the experts {name!r}, with a weight of {state.num_experts} rows; "
            f"{type(block).__name__} has {', '.join(map(repr, fitting)) or 'none'}. Set the key to null"
        )
    return found[0]


class _BiasedRouter(nn.Module):
    """Base class in front of a router; its bias takes part in the choice of experts."""

    @uncompiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the router returns for the experts that scores plus bias choose."""
        choice = _BiasedChoice(self.get_buffer(_BUFFER))
        with choice:
            result = super().forward(*args, **kwargs)
        if not choice.is_made:
            raise DeepSpeedConfigError(
                f"{KEY}: expected the router {type(self).__name__} to choose among {len(choice.bias)} experts by "
                "torch.topk; it did not call it. Set the key to null"
            )
        return result


class _BiasedChoice(ExpertChoice):
    """Makes ``topk`` over the scores of all experts choose by scores plus bias."""

    def __init__(self, bias: torch.Tensor) -> None:
        super().__init__()
        self.bias = bias  # [E]
        self.is_made = False
        self._is_by_groups = False  # groups of experts were chosen before; scores of the others are 0

    @override
    def choose(self, scores: torch.Tensor, topk: TopK) -> torch.Tensor | None:
        if scores.size(-1) != len(self.bias):
            self._is_by_groups = True
            return None
        self.is_made = True
        biased = scores.detach() + self.bias
        if self._is_by_groups:
            biased = biased.masked_fill(scores == 0, -torch.inf)
        indices: torch.Tensor = topk(biased).indices
        return indices
