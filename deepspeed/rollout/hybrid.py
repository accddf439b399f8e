"""Responses by the engine that trains, and the choice of a rollout engine."""

from __future__ import annotations

from typing import Any

import torch
from typing_extensions import override

from deepspeed.engine.hybrid import DeepSpeedHybridEngine
from deepspeed.errors import CallOrderError, DeepSpeedConfigError
from deepspeed.rollout.base import RolloutBatch, RolloutConfig, RolloutEngine, RolloutRequest, SamplingConfig


def build_rollout(rollout_cfg: RolloutConfig, student_engine: Any = None, tokenizer: Any = None) -> RolloutEngine:
    """Returns the rollout engine that a configuration names. Every rank must call it.

    Args:
        student_engine: The engine whose weights generate; made with ``hybrid_engine.enabled``.
        tokenizer: With ``eos_token_id`` and ``pad_token_id``.

    Raises:
        DeepSpeedConfigError: The name is unknown, or the student is missing or does not generate.
    """
    if rollout_cfg.engine != "hybrid_engine":
        raise DeepSpeedConfigError(
            f'RolloutConfig(engine="{rollout_cfg.engine}"): expected "hybrid_engine"; pass it, or send the weights to '
            "a server by engine.export_weights"
        )
    if student_engine is None:
        raise DeepSpeedConfigError(
            "build_rollout: expected student_engine, whose weights generate, found None; pass the engine of initialize"
        )
    return HybridEngineRollout(student_engine, tokenizer, rollout_cfg)


class HybridEngineRollout(RolloutEngine):
    """Generates responses with an engine's present weights.

    Args:
        engine: Made by ``deepspeed.initialize`` with ``hybrid_engine.enabled``.
        tokenizer: With ``eos_token_id`` and ``pad_token_id``.
        cfg: Kept for the program as ``cfg``; nothing here reads it.

    Raises:
        DeepSpeedConfigError: The engine does not generate, or the tokenizer has no token to pad with.
    """

    def __init__(self, engine: Any, tokenizer: Any, cfg: Any = None) -> None:
        if not isinstance(engine, DeepSpeedHybridEngine):
            raise DeepSpeedConfigError(
                f"HybridEngineRollout: expected an engine that generates, found {type(engine).__name__}; set "
                "hybrid_engine.enabled in its configuration"
            )
        self.cfg = cfg
        self._engine: DeepSpeedHybridEngine | None = engine
        self._end = tokenizer.eos_token_id
        self._padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else self._end
        if self._padding is None:
            raise DeepSpeedConfigError(
                "HybridEngineRollout: the tokenizer has neither pad_token_id nor eos_token_id; set tokenizer.pad_token"
            )

    @override
    def generate(self, request: RolloutRequest, sampling: SamplingConfig) -> RolloutBatch:
        """Returns responses to the prompts of this rank. Every rank must call it; prompts and lengths may differ.

        Raises:
            CallOrderError: After :meth:`shutdown`.
            ValueError: Prompts and their mask have different shapes, or a number cannot be used.
        """
        engine = self._engine
        if engine is None:
            raise CallOrderError("HybridEngineRollout.generate: shutdown() was called; make a new HybridEngineRollout")
        ids, mask = request.prompt_ids, request.prompt_attention_mask
        _check(ids, mask, sampling)
        ids, mask = (
            values.to(engine.device).repeat_interleave(sampling.n_samples_per_prompt, 0) for values in (ids, mask)
        )
        how: dict[str, Any] = {"max_new_tokens": sampling.max_new_tokens, "do_sample": sampling.temperature > 0}
        if sampling.temperature > 0:
            top_k = max(sampling.top_k, 0)
            how |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": top_k}
        modes = [(module, module.training) for module in engine.modules()]
        engine.eval()
        try:
            found = engine.generate(
                input_ids=ids, attention_mask=mask, pad_token_id=self._padding, eos_token_id=self._end, **how
            )
        finally:
            for module, is_training in modes:
                module.training = is_training
        start = ids.shape[1]
        return RolloutBatch(found, torch.cat((mask.long(), self._written(found[:, start:])), 1), start)

    def _written(self, response: torch.Tensor) -> torch.Tensor:
        """Returns a mask ``[samples, tokens]``: 1 up to and including the first end token, 0 after it."""
        if self._end is None:
            return torch.ones_like(response)
        ended = (response == self._end).long().cumsum(1)
        return ((ended - (response == self._end).long()) == 0).long()

    @override
    def sync_weights(self, step: int) -> None:
        """Does nothing, since generation uses the trained weights themselves. ``step`` is for other rollout engines."""

    def shutdown(self) -> None:
        """Drops the reference to the engine, which is not destroyed."""
        self._engine = None


def _check(ids: torch.Tensor, mask: torch.Tensor, sampling: SamplingConfig) -> None:
    if ids.dim() != 2 or ids.shape != mask.shape:
        raise ValueError(
            f"RolloutRequest: expected prompt_ids and prompt_attention_mask of one shape [prompts, length], found "
            f"{tuple(ids.shape)} and {tuple(mask.shape)}"
        )
    if bool((mask[:, -1] == 0).any()):
        raise ValueError("RolloutRequest: prompts must be padded on the left; some end with padding")
    if sampling.max_new_tokens < 1 or sampling.n_samples_per_prompt < 1:
        raise ValueError(f"{sampling}: max_new_tokens and n_samples_per_prompt are 1 or more")
