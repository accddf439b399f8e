"""What every rollout engine takes and returns: prompts in, responses out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch


@dataclass
class RolloutConfig:
    """Chooses a rollout engine."""

    engine: str = "hybrid_engine"  # generates with the trained weights themselves
    use_graph_capture: bool = False  # without effect: the model's own generate runs


@dataclass
class RolloutRequest:
    """Prompts of this rank."""

    prompt_ids: torch.Tensor  # int64 ``[prompts, length]``, padded on the left
    prompt_attention_mask: torch.Tensor  # ``[prompts, length]``, 0 where there is padding


@dataclass
class SamplingConfig:
    """Holds the settings of sampling."""

    max_new_tokens: int  # longest response, in tokens
    temperature: float = 1.0  # divides logits; 0 or less: the most likely token
    # draw from the fewest tokens whose probabilities sum to at least this (nucleus sampling); 1: all
    top_p: float = 1.0
    top_k: int = -1  # number of the most likely tokens to draw from; -1: all
    n_samples_per_prompt: int = 1  # responses to every prompt, side by side in the result
    continuous_batch_size: int | None = None  # for engines that admit prompts as others end; without effect here


@dataclass
class RolloutBatch:
    """Prompts with responses."""

    input_ids: torch.Tensor  # int64 ``[prompts x samples, length]``; after the end of a response there is padding
    # int64 of the same shape, 1 for tokens of prompts and responses, the end token included
    attention_mask: torch.Tensor
    response_start_idx: int  # index in dimension 1 at which all responses begin

    @property
    def batch_size(self) -> int:
        """The number of responses."""
        return self.input_ids.shape[0]

    @property
    def seq_len(self) -> int:
        """The tokens of a prompt with its response and padding."""
        return self.input_ids.shape[1]


class RolloutEngine(ABC):
    """Generates responses to prompts."""

    @abstractmethod
    def generate(self, request: RolloutRequest, sampling: SamplingConfig) -> RolloutBatch:
        """Returns responses to the prompts of this rank. Every rank must call it; prompts and lengths may differ."""

    @abstractmethod
    def sync_weights(self, step: int) -> None:
        """Brings the weights of update number ``step`` to where responses are generated. Every rank must call it."""
