"""Expert parallelism as an engine feature: spreads a model's experts over ranks, and connects expert layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from torch import nn
from typing_extensions import override

from deepspeed import comm
from deepspeed.engine_feature import EngineFeature, EngineHooks, EngineSetup, marks_of
from deepspeed.models.stacked_experts import stacked_weights
from deepspeed.parallel.expert.auto import spread_experts, spread_modules
from deepspeed.parallel.expert.balance import LoadBalancer, prepare_biases
from deepspeed.parallel.expert.dispatch import RoutingMetrics
from deepspeed.parallel.expert.layer import MOELayer
from deepspeed.parallel.expert.prepare import prepare_expert_layers
from deepspeed.parallel.expert.spread import spread_of
from deepspeed.parallel.optimizer_states import refuse_whole_states


class ExpertHooks(EngineHooks):
    """The loads of one engine's experts, for the monitors and for ``load_balance_coeff``."""

    def __init__(self, model: nn.Module, balancer: LoadBalancer | None = None) -> None:
        self._model = model
        self._balancer = balancer
        # With experts, the tokens of a rank decide which backwards can be split, and so when weights are gathered.
        is_expert_layer = any(__name__ in marks_of(layer) for layer in model.children())
        self.gathers_alike = not (is_expert_layer or any(stacked_weights(module) for module in model.modules()))

    @override
    def after_update(self, global_steps: int, *, was_skipped: bool) -> None:
        if self._balancer is not None:
            self._balancer.move(was_skipped=was_skipped)

    @override
    def events(self) -> Sequence[tuple[str, float]]:
        return expert_events(self._model)


class ExpertParallelism(EngineFeature):
    """Experts that are spread over ranks."""

    title = "spread experts"
    setting = "expert_parallel, deepspeed.moe.layer.MoE"

    @override
    def refuse(self, setup: EngineSetup) -> None:
        section = setup.root.expert_parallel
        if section is not None and section.enabled and not spread_modules(setup.model):
            refuse_whole_states(setup.optimizer, section.autoep_size, "expert_parallel.autoep_size")

    @override
    def reshape(self, setup: EngineSetup) -> Mapping[int, nn.Parameter]:
        root, section = setup.root, setup.root.expert_parallel
        data_first = root.use_data_before_expert_parallelism
        exchanged: Mapping[int, nn.Parameter] = {}
        if section is not None and section.enabled:
            axis = setup.job.axis_of(setup.ranks.zero_group)
            peers = axis.transport("outside engines", device=setup.device, timeout=comm.default_timeout())
            exchanged = spread_experts(setup.job, setup.model, section, peers, setup.device, data_first=data_first)
            if section.load_balance_coeff is not None:
                prepare_biases(setup.model, setup.device)
        prepare_expert_layers(
            setup.job, setup.model, setup.device, data_first=data_first, timed=root.wall_clock_breakdown
        )
        return exchanged

    @override
    def hooks(self, setup: EngineSetup, runtime: Any, groups: Any, batch_size: int) -> EngineHooks | None:
        section = setup.root.expert_parallel
        coefficient = section.load_balance_coeff if section is not None and section.enabled else None
        if coefficient is None:
            return ExpertHooks(setup.model)
        return ExpertHooks(setup.model, LoadBalancer(setup.model, coefficient, groups.peers))


FEATURE = ExpertParallelism()


_MOST_SINGLE = 512  # experts of all layers, up to which each has an event of its own
_CELL, _LEFT, _TOP = 18, 260, 40


def expert_balances(model: nn.Module) -> dict[str, RoutingMetrics]:
    """Returns the counts of this rank's routes in the last forward, by name of each expert layer that ran.

    These are layers of ``deepspeed.moe``, and those whose experts the ``expert_parallel`` section has spread.
    """
    found = {}
    for name, module in model.named_modules():
        state = module if isinstance(module, MOELayer) else spread_of(module)
        if state is not None and state.balance is not None:
            found[name] = state.balance
    return found


def expert_events(model: nn.Module) -> list[tuple[str, float]]:
    """Returns name and value of the events of a model's expert layers, numbered in their order; of this rank's tokens.

    Imbalance (the most loaded expert over the mean), dropped routes in percent, and each expert's share in percent
    while the layers have at most 512 experts together.
    """
    balances = expert_balances(model)
    singly = sum(len(balance.counts) for balance in balances.values()) <= _MOST_SINGLE
    events = []
    for number, balance in enumerate(balances.values()):
        events.append((f"experts/{number}/imbalance", balance.imbalance))
        events.append((f"experts/{number}/dropped_percent", 100 * balance.dropped_share))
        if singly:
            events += [(f"experts/{number}/load_percent_{e}", 100 * share) for e, share in enumerate(balance.shares)]
    return events


def save_loads_picture(model: nn.Module, path: str | PathLike[str]) -> None:
    """Writes the loads of the last forward as SVG: a row per layer, a column per expert, dark where many routes went.

    The routes are those of this rank, see :func:`expert_balances`.
    """
    Path(path).write_text(loads_svg(expert_balances(model)), encoding="utf-8")


def loads_svg(balances: Mapping[str, RoutingMetrics]) -> str:
    """Returns the picture; see :func:`save_loads_picture`."""
    columns = max((len(balance.counts) for balance in balances.values()), default=0)
    width, height = _LEFT + columns * _CELL + 170, _TOP + len(balances) * _CELL + 20
    parts = ['<text x="10" y="24" font-weight="bold">routes by expert; 1.0 is an even share</text>']
    for row, (name, balance) in enumerate(balances.items()):
        y = _TOP + row * _CELL
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 13}" text-anchor="end">{escape(name[-38:])}</text>')
        for expert, share in enumerate(balance.shares):
            relative = share * len(balance.shares)
            shade = max(0.0, min(relative / 3, 1.0))
            parts.append(
                f'<rect x="{_LEFT + expert * _CELL}" y="{y}" width="{_CELL - 1}" height="{_CELL - 1}" '
                f'fill="#1b6ca8" fill-opacity="{shade:.2f}" stroke="#ccc"><title>expert {expert}: {relative:.2f}'
                "</title></rect>"
            )
        words = f"at most {balance.imbalance:.2f}, {balance.dropped_share:.1%} dropped"
        parts.append(f'<text x="{_LEFT + columns * _CELL + 8}" y="{y + 13}">{words}</text>')
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        'font-size="11"><rect width="100%" height="100%" fill="#fff"/>'
    )
    return head + "".join(parts) + "</svg>\n"
