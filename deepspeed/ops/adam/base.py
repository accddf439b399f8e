"""What the two Adam classes share: which kind of weight decay they use."""

from __future__ import annotations

from typing import Any

from deepspeed.ops.base import ElementwiseOptimizer
from deepspeed.ops.rules import AdamRule, UpdateRule


class AdamOptimizer(ElementwiseOptimizer):
    """Adam or AdamW, as ``adam_w_mode`` says.

    The groups carry torch's key ``decoupled_weight_decay`` with the same answer, so that torch's classes understand
    our state dictionaries; a group or state dictionary that brings another answer does not change ours.
    """

    _kept_attributes = (*ElementwiseOptimizer._kept_attributes, "adam_w_mode")
    adam_w_mode: bool = True

    @property
    def rule(self) -> UpdateRule:
        """Adam's arithmetic with this optimizer's kind of weight decay."""
        return AdamRule(decoupled=bool(self.adam_w_mode))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group; keys of other optimizers (``foreach``, ``fused``, ...) are kept and without effect.

        Raises:
            ValueError: The group asks for AMSGrad.
        """
        super().add_param_group(param_group)
        self._mark_groups()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads like torch, but keeps the dtype of saved fp32 state, which torch casts to the parameter's."""
        super().load_state_dict(state_dict)
        self._mark_groups()

    def _mark_groups(self) -> None:
        for group in self.param_groups:
            group["decoupled_weight_decay"] = bool(self.adam_w_mode)
