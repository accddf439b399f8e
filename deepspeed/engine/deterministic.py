"""The engine feature ``deterministic``: the same run twice on one layout gives the same bits."""

from __future__ import annotations

from typing import Any

import torch
from typing_extensions import override

from deepspeed.data.seeding import LOADER_SEED
from deepspeed.engine_feature import EngineFeature, EngineHooks, EngineSetup
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.logging import log_dist
from deepspeed.zero.group import Groups
from deepspeed.zero.runtime import ZeroRuntime


class DeterministicFeature(EngineFeature):
    """Runs whose bits depend on nothing but the program, its configuration and its layout."""

    title = "deterministic runs"
    setting = "deterministic"

    @override
    def refuse(self, setup: EngineSetup) -> None:
        if not setup.root.deterministic:
            return
        if torch.backends.cudnn.benchmark:
            raise DeepSpeedConfigError(
                "deterministic: expected torch.backends.cudnn.benchmark to be False, as it chooses kernels by measured "
                "times, found True. Leave it at its default"
            )
        if setup.root.communication_compression.gradients == "auto":
            raise DeepSpeedConfigError(
                'deterministic with communication_compression.gradients="auto": the codec is chosen by measured times, '
                "which differ from run to run. Name a codec, or leave one of the two out"
            )

    @override
    def hooks(self, setup: EngineSetup, runtime: ZeroRuntime, groups: Groups, batch_size: int) -> EngineHooks | None:
        return _DeterministicHooks() if setup.root.deterministic else None

    @override
    def finish(self, engine: Any, training_data: Any) -> None:
        if hasattr(engine.training_dataloader, "seed"):  # one that another feature has made
            engine.training_dataloader.seed = LOADER_SEED


FEATURE = DeterministicFeature()


class _DeterministicHooks(EngineHooks):
    """Keeps torch's deterministic algorithms on while an engine lives."""

    _users = 0
    _before = (False, False)  # what the first user found

    def __init__(self) -> None:
        if _DeterministicHooks._users == 0:
            _DeterministicHooks._before = (
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
            )
        _DeterministicHooks._users += 1
        self._is_open = True
        torch.use_deterministic_algorithms(True)
        log_dist(
            "deterministic: torch's deterministic algorithms are on. An operation that has none raises when it is "
            "called, by its name"
        )

    @override
    def close(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        _DeterministicHooks._users -= 1
        if _DeterministicHooks._users == 0:
            is_on, only_warns = _DeterministicHooks._before
            torch.use_deterministic_algorithms(is_on, warn_only=only_warns)
