"""Code that the engine and the oracle share: losses, param groups, optimizers and the effects of actions."""

import re
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.random_programs.program import Action, Optimizer, Program
from tests.random_programs.values import IGNORED, fill

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BALANCE = 0.1  # weight of the experts' balance in the loss


def loss_of(logits: torch.Tensor, balance: Any, labels: torch.Tensor) -> torch.Tensor:
    """Returns the mean cross entropy over the labels that count, plus the weighted balance loss of the experts."""
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
    return loss + BALANCE * balance if isinstance(balance, torch.Tensor) else loss


def prepare(program: Program, parameters: Mapping[str, nn.Parameter], frozen: Mapping[str, bool], salt: int) -> None:
    """Sets the initial values, and freezes or unfreezes parameters as earlier phases did."""
    fill(parameters, salt)
    for name, parameter in parameters.items():
        if name in frozen:
            parameter.requires_grad_(not frozen[name])


def param_groups(choice: Optimizer, parameters: Mapping[str, nn.Parameter]) -> list[dict[str, Any]]:
    """Returns groups, each with its own learning rate and weight decay; a name is in the same group on all ranks."""
    rate = dict(choice.params)["lr"]
    has_decay = "weight_decay" in dict(choice.params)
    groups: list[dict[str, Any]] = []
    for number in range(choice.groups):
        more = {"lr": rate / (number + 1), **({"weight_decay": 0.05 * number} if has_decay else {})}
        groups.append({"params": [], **(more if choice.groups > 1 else {})})
    for name, parameter in parameters.items():
        if parameter.requires_grad or choice.with_frozen:
            shared = re.sub(r"experts\.\d+", "experts", name)  # ranks have different experts in the same place
            groups[zlib.crc32(shared.encode()) % choice.groups]["params"].append(parameter)
    return [group for group in groups if group["params"]]


def build_optimizer(choice: Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Returns the optimizer of torch."""
    made: torch.optim.Optimizer = getattr(torch.optim, choice.name)(groups, **dict(choice.params))
    return made


def build_schedule(choice: Optimizer, optimizer: torch.optim.Optimizer) -> Any:
    """Returns the schedule of torch, or None."""
    if not choice.schedule:
        return None
    return getattr(torch.optim.lr_scheduler, choice.schedule)(optimizer, **dict(choice.schedule_params))


def chosen(names: Iterable[str], action: Action) -> list[str]:
    """Returns the parameters that an action affects, in the same order on all ranks.

    Experts are left out: ranks that share them have different ones under the same name.
    """
    candidates = [name for name in names if "experts" not in name]
    candidates.sort(key=lambda name: zlib.crc32(f"{name}{action.salt}".encode()))
    return candidates[: len(candidates) // 2 if action.name in ("freeze", "unfreeze") else 3]


def changed(value: torch.Tensor) -> torch.Tensor:
    """Returns the value that a writing action gives to a parameter, a gradient or a state."""
    return value * 0.5
