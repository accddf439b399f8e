"""Texts for reinforcement learning, written by the engine that trains: prompts in, prompts with responses out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from deepspeed.engine.hybrid import DeepSpeedHybridEngine
from deepspeed.errors import CallOrderError, DeepSpeedConfigError


@dataclass
class RolloutRequest:
    """Prompts of this rank.

    Attributes:
        prompt_ids: int64 ``[prompts, length]``, padded on the left.
        prompt_attention_mask: ``[prompts, length]``, 0 where there is padding.
    """

    prompt_ids: torch.Tensor
    prompt_attention_mask: torch.Tensor


@dataclass
class SamplingConfig:
    """How tokens are drawn.

    Attributes:
        max_new_tokens: Longest response, in tokens.
        temperature: Divides logits; 0 or less: the most likely token.
        top_p: Least probability that the tokens in question have together; 1: all.
        top_k: So many of the most likely tokens; -1: all.
        n_samples_per_prompt: Responses to every prompt, side by side in the result.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    n_samples_per_prompt: int = 1


@dataclass
class RolloutBatch:
    """Prompts with responses.

    Attributes:
        input_ids: int64 ``[prompts x samples, length]``; after the end of a response there is padding.
        attention_mask: int64 of the same shape, 1 for tokens of prompts and responses, the end token included.
        response_start_idx: Where responses begin in every row.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    response_start_idx: int


class HybridEngineRollout:
    """Writes responses with an engine's present weights.

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
            raise DeepSpeedConfigError("HybridEngineRollout: the tokenizer has neither pad_token_id nor eos_token_id")

    def generate(self, request: RolloutRequest, sampling: SamplingConfig) -> RolloutBatch:
        """Responses to the prompts of this rank. Every rank must call it; prompts and lengths may differ.

        Raises:
            CallOrderError: After :meth:`shutdown`.
            ValueError: Prompts and their mask have different shapes, or a number cannot be used.
        """
        engine = self._engine
        if engine is None:
            raise CallOrderError("HybridEngineRollout.generate: shutdown() was called")
        ids, mask = request.prompt_ids, request.prompt_attention_mask
        _check(ids, mask, sampling)
        ids, mask = (
            values.to(engine.device).repeat_interleave(sampling.n_samples_per_prompt, 0) for values in (ids, mask)
        )
        how: dict[str, Any] = {"max_new_tokens": sampling.max_new_tokens, "do_sample": sampling.temperature > 0}
        if sampling.temperature > 0:
            top_k = max(sampling.top_k, 0)
            how |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": top_k}
        was_training = engine.training
        engine.eval()
        try:
            found = engine.generate(
                input_ids=ids, attention_mask=mask, pad_token_id=self._padding, eos_token_id=self._end, **how
            )
        finally:
            engine.train(was_training)
        start = ids.shape[1]
        return RolloutBatch(found, torch.cat((mask.long(), self._written(found[:, start:])), 1), start)

    def _written(self, response: torch.Tensor) -> torch.Tensor:
        """1 up to the first end token, and for it."""
        if self._end is None:
            return torch.ones_like(response)
        ended = (response == self._end).long().cumsum(1)
        return ((ended - (response == self._end).long()) == 0).long()

    def sync_weights(self, step: int) -> None:
        """Nothing to do: the weights that generate are those that train. ``step`` is for other kinds of rollout."""

    def shutdown(self) -> None:
        """Lets go of the engine, which is not destroyed."""
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
