"""The 1-bit family as a feature of the engine: states what its optimizers cannot be combined with."""

from __future__ import annotations

import torch

from deepspeed.engine_feature import (
    ISLANDS,
    STAGE_3,
    Conflict,
    ConflictKey,
    EngineFeature,
    EngineSetup,
)
from deepspeed.ops.onebit import OneBitAdam, OneBitLamb, ZeroOneAdam


def _uses(setup: EngineSetup, *classes: type[torch.optim.Optimizer]) -> bool:
    if setup.optimizer is not None:
        return isinstance(setup.optimizer, classes)
    section = setup.root.optimizer
    return section is not None and section.type in {kind.__name__ for kind in classes}


def _offload(setup: EngineSetup) -> str | None:
    section = setup.root.zero_optimization.offload_optimizer
    is_offloaded = section is not None and section.device != "none"
    return "with zero_optimization.offload_optimizer" if is_offloaded else None


def _snip(setup: EngineSetup) -> str | None:
    compression = setup.root.compression_training
    pruning = None if compression is None else compression.sparse_pruning
    shared = None if pruning is None else pruning.shared_parameters
    is_snip = shared is not None and shared.enabled and shared.method == "snip_momentum"
    return "with compression_training.sparse_pruning by snip_momentum" if is_snip else None


def _set(key: str, title: str) -> ConflictKey:
    """Returns what a key of ``communication_compression`` switches on."""
    words = f"with communication_compression.{key}"
    return ConflictKey(
        title, lambda setup: None if getattr(setup.root.communication_compression, key) is None else words
    )


_FAMILY = "optimizer.type OneBitAdam / OneBitLamb / ZeroOneAdam"
_CUT_MASTERS = ConflictKey(
    "ZeRO stages 1 and 2",
    lambda setup: (
        f"with zero_optimization.stage {setup.root.zero_optimization.stage}"
        if setup.root.zero_optimization.stage in (1, 2)
        else None
    ),
)


class OneBitOptimizer(EngineFeature):
    """Exchanges the momenta of OneBitAdam, OneBitLamb and ZeroOneAdam instead of gradients."""

    title = "1-bit optimizers"
    setting = _FAMILY
    conflicts = (
        *(
            Conflict(_FAMILY, lambda setup: _uses(setup, OneBitAdam, OneBitLamb, ZeroOneAdam), *conflict)
            for conflict in (
                (
                    STAGE_3,
                    "each rank needs the whole momentum at each step, more than stage 3 saves",
                    "use stage 0, 1 or 2, or another optimizer with communication_compression",
                ),
                (
                    ConflictKey("offloaded optimizer states", _offload),
                    "the momentum is sent at each step, so it stays on the device",
                    "leave the section out",
                ),
                (
                    _set("gradients", "compressed gradients"),
                    "these optimizers exchange momenta instead of gradients",
                    "leave the key out, or use AdamW with it. For gradients of the warm-up use "
                    "communication_compression.warm_up",
                ),
                (
                    ConflictKey("pruning by snip_momentum", _snip),
                    "gradients differ between ranks under these optimizers, which would prune different weights",
                    "use the method topk, or AdamW",
                ),
            )
        ),
        *(
            Conflict("optimizer.type ZeroOneAdam", lambda setup: _uses(setup, ZeroOneAdam), *conflict)
            for conflict in (
                (
                    _CUT_MASTERS,
                    "between exchanges each rank moves all its weights by itself, for which it needs all masters and "
                    "states",
                    "use stage 0, or OneBitAdam",
                ),
                (
                    _set("warm_up", "compressed gradients in the warm-up"),
                    "its variance is updated from exact mean gradients, and nothing else of gradients is sent",
                    "leave the key out",
                ),
                (
                    ISLANDS,
                    "ranks of an island would differ when islands meet, as they take steps of their own",
                    "use OneBitAdam on islands, or leave the islands out",
                ),
            )
        ),
    )


FEATURE = OneBitOptimizer()
