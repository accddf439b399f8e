"""Mixture-of-experts layers: a gate, experts on several ranks, and the exchange between them."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

from deepspeed.axes import EXPERT
from deepspeed.comm.job import groups
from deepspeed.comm.job.expert_groups import group_name
from deepspeed.comm.job.job import axis_of, is_initialized
from deepspeed.comm.transports.transport import Transport
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.parallel.expert.dispatch import RoutingMetrics, dispatch, plan_routes
from deepspeed.parallel.expert.gate import TopKGate, check_policy
from deepspeed.uncompiled import uncompiled
from deepspeed.zero.access.gathered import GatheredParameters
from deepspeed.zero.address import address_of
from deepspeed.zero.construction.modules import is_sharding, shard_built
from deepspeed.zero.gather.leaf_modules import set_z3_leaf_module
from deepspeed.zero.tiling.describe import in_group


class MOELayer(nn.Module):
    """Sends tokens to their experts and returns the weighted sums of the results.

    Every rank of the expert-parallel group must call it equally often; the number of tokens may differ between ranks.
    ``ep_size`` ranks share the experts, of which this one has ``num_local_experts``; ``ep_group_name`` names their
    group. ``use_tutel`` has no effect.
    """

    _is_expert_layer = True
    _ds_features = ("deepspeed.parallel.expert.feature",)

    def __init__(
        self,
        gate: TopKGate,
        experts: Experts,
        ep_group_name: str,
        ep_size: int,
        num_local_experts: int,
        use_tutel: bool = False,
    ) -> None:
        super().__init__()
        self.gate = gate
        self.experts = experts
        self.ep_group: Any = None
        self.ep_size = ep_size
        self.ep_group_name = ep_group_name
        self.num_local_experts = num_local_experts
        self.use_tutel = use_tutel
        self.wall_clock_breakdown = False
        self.time_falltoall = 0.0  # milliseconds of ``time_moe`` in the exchange of tokens sent to experts
        self.time_salltoall = 0.0  # milliseconds of ``time_moe`` in the exchange of the experts' results
        self.time_moe = 0.0  # milliseconds of the host in the last forward, while ``wall_clock_breakdown``
        self.l_aux: torch.Tensor | None = None  # balance loss of the last forward, 0-dim fp32
        # ``[E]`` int64: how many routes of this rank chose each expert in the last forward, before any is dropped
        self.exp_counts: torch.Tensor | None = None
        self.balance: RoutingMetrics | None = None  # counts of the routes of the last forward; None before the first
        self._transport: Transport | None = None
        set_z3_leaf_module(self, True)

    @uncompiled
    def forward(self, *input: Any, **kwargs: Any) -> torch.Tensor:  # noqa: A002 - upstream's name
        """Sends tokens, hidden states ``[..., M]``, to their experts and returns the weighted sums of the results.

        ``used_token`` may follow, or come by name. The result has the shape and dtype of the hidden states.
        """
        started = time.perf_counter()
        hidden, used_token = input[0], input[1] if len(input) > 1 else kwargs.get("used_token")
        x = hidden.reshape(-1, hidden.shape[-1])
        routes = self.gate.routes(x, used_token)
        self.l_aux, self.exp_counts = routes.l_aux, routes.counts
        if self._transport is None:
            self.connect(x.device)
        plan = plan_routes(routes.indices, routes.num_experts, self._transport)
        self.balance = RoutingMetrics.of(plan)
        # One parameter is enough: the layer is a ZeRO-3 leaf, whose parameters are gathered together.
        needed = list(islice(self.experts.parameters(), 1))
        out = dispatch(x, routes.weights, plan, self.experts, needed, module=self)
        out = out.to(hidden.dtype).reshape(hidden.shape)
        if self.wall_clock_breakdown:
            self.time_moe = (time.perf_counter() - started) * 1000
            there, back = (*plan.waited[:2], 0.0, 0.0)[:2]  # none where one rank has all experts
            self.time_falltoall, self.time_salltoall = there * 1000, back * 1000
        return out

    def _set_ep_group(self, ep_group: Any) -> None:
        """Sets a process group that the program made; allowed once.

        Raises:
            DeepSpeedConfigError: The layer already has another group.
        """
        if self.ep_group is not None and self.ep_group is not ep_group:
            raise DeepSpeedConfigError(
                f"the expert layer has the group {self.ep_group_name!r} already; build a new layer for other ranks"
            )
        self.ep_group = ep_group
        self.gate.ep_group = ep_group

    def connect(self, device: torch.device | None = None) -> None:
        """Creates the layer's process groups. Every rank of the job must call it, in the same order.

        ``device`` is where the tokens are; None: the accelerator, unless the backend is a host backend.
        """
        if self.ep_group is not None:
            self._transport = axis_of(self.ep_group, EXPERT).transport("outside engines", device=device)
        elif self.ep_size > 1:
            groups.declare_expert_groups(self.ep_size)
            self._transport = groups.expert_axis(self.ep_size, device).transport("layers")

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for a copy, without the groups and the results of the last forward."""
        return {**self.__dict__, "_transport": None, "ep_group": None, "l_aux": None, "exp_counts": None}


class MoE(nn.Module):
    """A mixture-of-experts layer that replaces the module ``expert``.

    Args:
        hidden_size: M, the last dimension of the input.
        expert: The module that every expert is a copy of; ``[n, M]`` in, ``[n, M]`` out.
        num_experts: E, of all ranks together.
        ep_size: Ranks that share the experts; a divisor of E and of the data-parallel ranks.
        k: Experts per token; :class:`TopKGate` explains the arguments that are left out here.
        use_residual: Every token also goes through ``expert`` itself, and a learnt coefficient mixes both (PR-MoE,
            Rajbhandari et al. 2022).
        use_tutel: Accepted without effect.
        enable_expert_tensor_parallelism: The program itself has cut the experts over the tensor-parallel ranks.

    Raises:
        DeepSpeedConfigError: The sizes do not fit, or the noise policy is unknown.
    """

    def __init__(
        self,
        hidden_size: int,
        expert: nn.Module,
        num_experts: int = 1,
        ep_size: int = 1,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        use_residual: bool = False,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        use_tutel: bool = False,
        enable_expert_tensor_parallelism: bool = False,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        super().__init__()
        _check_sizes(num_experts, ep_size)
        check_policy(noisy_gate_policy)
        self.use_residual = use_residual
        self.enable_expert_tensor_parallelism = enable_expert_tensor_parallelism
        self.ep_size = ep_size
        self.expert_group_name = group_name(ep_size)
        self.num_experts = num_experts
        self.num_local_experts = num_experts // ep_size
        with _shared_by(ep_size):
            experts = Experts(expert, self.num_local_experts, self.expert_group_name)
        gate = TopKGate(
            hidden_size,
            num_experts,
            k,
            capacity_factor,
            eval_capacity_factor,
            min_capacity,
            noisy_gate_policy,
            drop_tokens,
            use_rts,
            None,
            top2_2nd_expert_sampling,
        )
        self.deepspeed_moe = MOELayer(
            gate, experts, self.expert_group_name, ep_size, self.num_local_experts, use_tutel=use_tutel
        )
        if use_residual:
            self.mlp = expert
            self.coefficient = nn.Linear(hidden_size, 2)

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Creates the layer's process groups. Every rank of the job must call it, in the same order.

        ``initialize`` calls it, with ``use_data_before_expert_parallelism`` of the configuration; a layer that is used
        without an engine calls it by itself when it first runs.
        """
        if self.ep_size > 1:
            groups._create_expert_and_data_parallel(self.ep_size, use_data_before_expert_parallel_)
            self.deepspeed_moe.connect()

    def forward(
        self, hidden_states: torch.Tensor, used_token: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Runs the experts, and with ``use_residual`` the dense layer beside them.

        Args:
            hidden_states: ``[..., M]``.
            used_token: ``[S]`` of 0 and 1: tokens with 0 go nowhere (k = 1).

        Returns:
            ``(output, l_aux, exp_counts)``: output with the shape and dtype of ``hidden_states``; the balance loss,
            0-dim fp32; how many routes of this rank chose each expert, ``[E]`` int64.
        """
        output = self.deepspeed_moe(hidden_states, used_token)
        if self.use_residual:
            dense = first_of(self.mlp(hidden_states))
            share = F.softmax(self.coefficient(hidden_states), dim=-1)
            output = output * share[..., 0:1] + dense * share[..., 1:]
        return output, self.deepspeed_moe.l_aux, self.deepspeed_moe.exp_counts


def _shared_by(ep_size: int) -> AbstractContextManager[None]:
    """Lets ``zero.Init`` shard what is built inside the context among the ranks that hold the same experts.

    Without ``zero.Init`` the groups are declared by ``initialize``, whose configuration may lay them out differently.
    """
    if ep_size == 1 or not is_initialized() or not is_sharding():
        return nullcontext()
    groups.declare_expert_groups(ep_size)
    return in_group(group_name(ep_size))


def _check_sizes(num_experts: int, ep_size: int) -> None:
    if not isinstance(num_experts, int):
        raise DeepSpeedConfigError(
            f"MoE(num_experts={num_experts!r}): expected one number; for a pyramid give each layer its own"
        )
    if num_experts < 1 or ep_size < 1 or num_experts % ep_size:
        raise DeepSpeedConfigError(
            f"MoE(num_experts={num_experts}, ep_size={ep_size}): the ranks share the experts evenly; choose ep_size "
            "among the divisors of num_experts"
        )


_MARKS = ("tensor_model_parallel", "model_parallel", "partition_dim", "partition_stride")
"""Attributes that programs set on parameters that they cut over tensor-parallel ranks."""


class Experts(nn.Module):
    """This rank's experts of one mixture-of-experts layer; each computes the tokens routed to it.

    All copies begin with equal values. Their attributes ``allreduce = False`` and ``group_name`` show which ranks share
    them; without a group name all data-parallel ranks do. At ZeRO stage 3 they are gathered together, as it is not
    known in advance which will be needed. ``expert`` takes a tensor and returns a tensor (or a tuple that begins with
    one) of equal length.
    """

    def __init__(self, expert: nn.Module, num_local_experts: int = 1, expert_group_name: str | None = None) -> None:
        super().__init__()
        self.num_local_experts = num_local_experts
        is_shared_by_all = expert_group_name in (None, "ep_size_1")
        self.deepspeed_experts = nn.ModuleList(
            copy.deepcopy(expert) if is_shared_by_all else _copy(expert) for _ in range(num_local_experts)
        )
        for made in self.deepspeed_experts:
            for old, new in zip(expert.parameters(), made.parameters(), strict=True):
                for mark in _MARKS:  # deepcopy does not copy attributes of parameters
                    if hasattr(old, mark):
                        setattr(new, mark, getattr(old, mark))
        for parameter in self.deepspeed_experts.parameters():
            parameter.allreduce = False  # type: ignore[attr-defined]
            parameter.group_name = expert_group_name or "ep_size_1"  # type: ignore[attr-defined]
        set_z3_leaf_module(self, True)

    def forward(self, inputs: torch.Tensor | Sequence[torch.Tensor]) -> Any:
        """Runs every expert on its rows ``[n, M]``, or all on one tensor whose second dimension is that of the experts.

        An expert without rows is not run. Returns one result per expert, or a tensor in the form of ``inputs``.
        """
        is_one = isinstance(inputs, torch.Tensor)
        each = inputs.chunk(self.num_local_experts, dim=1) if isinstance(inputs, torch.Tensor) else inputs
        pairs = zip(self.deepspeed_experts, each, strict=True)
        results = [first_of(expert(rows)) if rows.numel() else rows for expert, rows in pairs]
        return torch.cat(results, dim=1) if is_one else results


def first_of(result: Any) -> torch.Tensor:
    """Returns ``result``, or its first entry if it is a tuple."""
    found: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return found


def _copy(expert: nn.Module) -> nn.Module:
    """Returns a deep copy with its own parameters.

    Those of the original are gathered first if ``zero.Init`` has sharded them.
    """
    if all(address_of(parameter) is None for parameter in expert.parameters()):
        return copy.deepcopy(expert)
    made = copy.deepcopy(expert)
    with GatheredParameters(list(made.parameters())):
        values = {
            name: nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
            for name, parameter in made.named_parameters()
        }
    for name, parameter in values.items():
        place, _, last = name.rpartition(".")
        setattr(made.get_submodule(place), last, parameter)
    shard_built(made)
    return made
