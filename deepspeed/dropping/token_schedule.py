"""How many tokens the layers of random-LTD keep, as a function of the step (arXiv:2211.11586)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepspeed.data.curriculum.scheduler import grown


class RandomLTDScheduler:
    """Tokens kept per sequence, growing linearly with the step, and a count of all tokens that layers have seen.

    Args:
        config: ``total_layer_num``, ``random_ltd_layer_num``, ``random_ltd_schedule`` (``min_value``, ``max_value`` and
            ``schedule_config`` with ``require_steps`` and ``seq_per_step``) and ``global_batch_size``: samples of an
            update.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        schedule = config["random_ltd_schedule"]
        self.model_layer_num: int = config["total_layer_num"]
        self.random_ltd_layer_num: int = config["random_ltd_layer_num"]
        self.global_batch_size: int = config["global_batch_size"]
        self._min, self._max = schedule["min_value"], schedule["max_value"]
        self._steps = schedule["schedule_config"]["require_steps"]
        self._granularity = schedule["schedule_config"]["seq_per_step"]
        self.reset_to_init()

    def reset_to_init(self) -> None:
        """Goes to before the first step."""
        self._current = self._min
        self._consumed = 0
        self._step = -1

    def get_value(self, global_steps: int) -> int:
        """Tokens kept at a step; nothing is changed."""
        return grown(global_steps, low=self._min, high=self._max, steps=self._steps, granularity=self._granularity)

    def get_current_seq(self) -> int:
        """Tokens kept now."""
        return self._current

    def set_current_seq(self, seq_length: int) -> None:
        """Sets it, until the next update."""
        self._current = seq_length

    def get_random_ltd_layer_num(self) -> int:
        """Layers that drop tokens."""
        return self.random_ltd_layer_num

    def update_seq(self, global_steps: int) -> None:
        """Goes to a step; the first call of a step counts its tokens."""
        self._current = self.get_value(global_steps)
        if global_steps != self._step:
            self._consumed += self._tokens_of_a_step()
            self._step = global_steps

    def _tokens_of_a_step(self) -> int:
        dropping, whole = self.random_ltd_layer_num, self.model_layer_num - self.random_ltd_layer_num
        return self.global_batch_size * (self._current * dropping + self._max * whole)

    def get_total_layer_tokens(self, train_iters: int) -> int:
        """Tokens, over all layers, of so many steps from the first; nothing is changed."""
        saved = self.state_dict()
        self.reset_to_init()
        for step in range(train_iters):
            self.update_seq(step)
        total = self._consumed
        self.load_state_dict(saved)
        return total

    def state_dict(self) -> dict[str, int]:
        """Bounds, tokens kept, tokens seen, and the step."""
        return {
            "min_value": self._min,
            "max_value": self._max,
            "current_value": self._current,
            "consumed_layer_tokens": self._consumed,
            "current_steps": self._step,
        }

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Goes to where :meth:`state_dict` was; the bounds stay those of the configuration."""
        self._current = state_dict["current_value"]
        self._consumed = state_dict["consumed_layer_tokens"]
        self._step = state_dict["current_steps"]
