"""Engines for stacks: compressed models, param groups, optimizers of the program or of the configuration."""

import copy
from typing import Any

import torch
from torch import nn

from tests.random_stacks.models import Block
from tests.random_stacks.stack import Config, Stack


def build(stack: Stack, model: nn.Module, config: Config, data: Any = None) -> Any:
    """Returns the engine of a model, which has a loader of ``data`` if that is given. Every rank must call it.

    Options of the stack: ``groups``, matrices and the rest are param groups of their own; ``expert_groups``, experts
    are, as client optimizers need them.
    """
    import deepspeed

    if "compression_training" in config:
        from deepspeed.compression import init_compression

        model = init_compression(model, copy.deepcopy(config))
    if stack.optimizer == "Muon":
        for parameter in model.parameters():
            parameter.use_muon = parameter.dim() == 2  # type: ignore[attr-defined]
    if "data_routing" in config.get("data_efficiency", {}):
        from deepspeed.dropping import convert_to_random_ltd

        convert_to_random_ltd(model, Block)
    given = _param_groups(stack, model)
    if stack.optimizer == "client AdamW":
        more: dict[str, Any] = {"optimizer": torch.optim.AdamW(given, lr=0.01, eps=1e-3)}
    elif stack.optimizer == "client SGD":
        more = {"optimizer": torch.optim.SGD(given, lr=0.1, momentum=0.5)}
    else:
        more = {"model_parameters": given}
    return deepspeed.initialize(model=model, config=copy.deepcopy(config), training_data=data, **more)[0]


def _param_groups(stack: Stack, model: nn.Module) -> Any:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if stack.options.get("expert_groups"):
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

        return split_params_into_different_moe_groups_for_optimizer({"params": trained, "name": "all"})
    if not stack.options.get("groups") or stack.optimizer == "Muon":
        return trained
    matrices = [parameter for parameter in trained if parameter.dim() > 1]
    others = [parameter for parameter in trained if parameter.dim() <= 1]
    first: dict[str, Any] = {"params": matrices, "lr": 0.007}
    if stack.optimizer in ("AdamW", "Adam", "client AdamW"):
        first["betas"] = (0.8, 0.95)
    return [first, {"params": others, "weight_decay": 0.0}]


def mean_over_ranks(value: Any) -> float:
    """Returns the mean of a number or of a tensor of one element. Every rank must call it."""
    import torch.distributed as dist

    total = torch.as_tensor(value).detach().double().reshape(1).clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()
