"""The optimizer of stage 3, whose methods read and write the states of single parameters."""

from __future__ import annotations

import torch
from torch import nn

from deepspeed.zero.access import states
from deepspeed.zero.update.optimizer import DeepSpeedZeroOptimizer


class DeepSpeedZeroOptimizer_Stage3(DeepSpeedZeroOptimizer):  # noqa: N801 - the public name
    """The optimizer at stage 3; a class of its own because users and integrations import it.

    Its methods are other names of the functions in :mod:`deepspeed.zero.access.states`, which raise the same errors and
    say which ranks must call. ``optim_state_key`` None stands for the master weight.
    """

    def get_full_hp_param(self, param: nn.Parameter, optim_state_key: str | None = None) -> torch.Tensor | None:
        """Returns the fp32 master weight or an optimizer state, whole; None where the parameter is not trained."""
        if optim_state_key is None:
            return states.safe_get_full_fp32_param(param)
        return states.safe_get_full_optimizer_state(param, optim_state_key)

    def set_full_hp_param(self, value: torch.Tensor, param: nn.Parameter, optim_state_key: str | None = None) -> None:
        """Writes the master weight or an optimizer state, in the full shape."""
        if optim_state_key is None:
            states.safe_set_full_fp32_param(param, value)
        else:
            states.safe_set_full_optimizer_state(param, value, optim_state_key)

    def get_local_fp32_param(self, param: nn.Parameter, optim_state_key: str | None = None) -> torch.Tensor | None:
        """Returns this rank's part of the master weight or of an optimizer state, 1-D, possibly empty."""
        if optim_state_key is None:
            return states.safe_get_local_fp32_param(param)
        return states.safe_get_local_optimizer_state(param, optim_state_key)

    def set_local_hp_param(self, value: torch.Tensor, param: nn.Parameter, optim_state_key: str | None = None) -> None:
        """Writes this rank's part of the master weight or of an optimizer state."""
        if optim_state_key is None:
            states.safe_set_local_fp32_param(param, value)
        else:
            states.safe_set_local_optimizer_state(param, value, optim_state_key)

    def get_fp32_grad_for_param(self, param: nn.Parameter) -> torch.Tensor | None:
        """Returns the reduced gradient, whole, without the loss scale; None where there is none."""
        return states.safe_get_full_grad(param)

    def set_fp32_grad_for_param(self, value: torch.Tensor, param: nn.Parameter) -> None:
        """Replaces the reduced gradient by ``value`` in the full shape, without the loss scale."""
        states.safe_set_full_grad(param, value)

    def get_local_fp32_grad_for_param(self, param: nn.Parameter) -> torch.Tensor | None:
        """Returns this rank's part of the reduced gradient, 1-D, without the loss scale; None where there is none."""
        return states.safe_get_local_grad(param)

    def set_local_grad_for_param(self, value: torch.Tensor, param: nn.Parameter) -> None:
        """Replaces this rank's part of the reduced gradient, without the loss scale."""
        states.safe_set_local_grad(param, value)
