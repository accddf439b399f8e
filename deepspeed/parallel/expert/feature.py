"""What the engine does for experts: spreads those of a model over ranks, and connects expert layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from typing_extensions import override

from deepspeed import comm
from deepspeed.comm.job.job import Job
from deepspeed.engine_feature import EngineFeature, EngineHooks, EngineSetup
from deepspeed.parallel.expert.auto import spread_experts, spread_modules
from deepspeed.parallel.expert.loads import expert_events
from deepspeed.parallel.expert.prepare import prepare_expert_layers
from deepspeed.parallel.optimizer_states import refuse_whole_states


class ExpertHooks(EngineHooks):
    """The loads of one engine's experts, for the monitors."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

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
            axis = Job.current().axis_of(setup.ranks.zero_group)
            peers = axis.transport("outside engines", device=setup.device, timeout=comm.default_timeout())
            exchanged = spread_experts(setup.model, section, peers, setup.device, data_first=data_first)
        prepare_expert_layers(setup.model, setup.device, data_first=data_first, timed=root.wall_clock_breakdown)
        return exchanged

    @override
    def hooks(self, setup: EngineSetup, runtime: Any, groups: Any, batch_size: int) -> EngineHooks | None:
        return ExpertHooks(setup.model)


FEATURE = ExpertParallelism()
