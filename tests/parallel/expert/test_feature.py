"""The engine feature of experts: what it tells a pipeline about the order of gathers."""

import pytest
from torch import nn

from deepspeed.engine.features import FeatureHooks
from deepspeed.engine_feature import EngineHooks
from deepspeed.moe.layer import MoE
from deepspeed.parallel.expert.feature import ExpertHooks


def stage(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), *layers)


def transformers_block() -> nn.Module:
    from tests.parallel.expert.models import build

    return build("mixtral").model.layers[0]


@pytest.mark.parametrize(
    ("make", "gathers_alike"),
    [
        (stage, True),
        (lambda: stage(MoE(8, nn.Linear(8, 8), num_experts=2)), False),
        (lambda: stage(transformers_block()), False),
    ],
    ids=["dense", "moe", "transformers"],
)
def test_tokens_decide_when_a_stage_with_experts_gathers(make, gathers_alike) -> None:
    hooks = FeatureHooks({"experts": ExpertHooks(make()), "other": EngineHooks()})
    assert hooks.gathers_alike is gathers_alike
