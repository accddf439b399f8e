"""Which ranks share which parameters of an engine, and how values travel between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from deepspeed.engine.communication_compression import with_codecs
from deepspeed.engine.groups import create_groups, refuse_cut_tensors
from deepspeed.engine.runtime_options import gathers_by_nodes, gradient_divisor
from deepspeed.engine.zero_plus_plus import use_zero_plus_plus
from deepspeed.engine_feature import EngineSetup
from deepspeed.precision.policy import PrecisionPolicy
from deepspeed.zero.group import Groups
from deepspeed.zero.placement import Home, Placement
from deepspeed.zero.tiling.describe import OFFLOADED


def make_groups(
    setup: EngineSetup,
    placement: Placement,
    precision: PrecisionPolicy,
    optimizer: torch.optim.Optimizer | None,
    own: Mapping[str, bool],
    *,
    has_warm_up: bool,
) -> tuple[Groups, Placement]:
    """Makes the groups of an engine. Every rank of the job must call it.

    Args:
        setup: What was asked for.
        placement: Where model states live, as far as the configuration says it.
        precision: Dtypes of what travels.
        optimizer: The torch optimizer, or None.
        own: Groups of parameters that are sharded by themselves, and whether this rank counts in each.
        has_warm_up: Gradients travel in the warm-up of the optimizer only.

    Returns:
        The groups, and the placement with the memory of frozen bases.

    Raises:
        DeepSpeedConfigError: Groups that cannot be used together.
        NotYetSupportedError: The optimizer needs whole tensors, of which ranks have parts.
    """
    root, ranks = setup.root, setup.ranks
    groups = create_groups(
        placement,
        ranks,
        setup.device,
        by_nodes=gathers_by_nodes(root),
        divisor=gradient_divisor(root, ranks),
        copies=own,
    )
    groups = with_codecs(groups, root, precision, setup.device, has_warm_up=has_warm_up)
    groups = use_zero_plus_plus(groups, root.zero_optimization)
    placement = replace(placement, base_home=Home.HOST if OFFLOADED in own else Home.DEVICE)
    refuse_cut_tensors(optimizer, setup.model, groups, placement)
    return groups, placement
