"""Sequence parallelism as Accelerate, the Trainer and training scripts ask for it (ALST, arXiv 2506.13996)."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from deepspeed.comm import groups
from deepspeed.comm.world import size_of
from deepspeed.config.batch import ACCUMULATION, MICRO, TOTAL
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.logging import log_dist
from deepspeed.parallel.sequence import state
from deepspeed.parallel.sequence.shares import shares_of_heads
from deepspeed.parallel.sequence.transformers_models import core_of, share_sequences, sharing_of


class UlyssesSPAttentionHF:
    """Where sequence parallelism of Transformers models is switched on."""

    @classmethod
    def register_with_transformers(
        cls,
        model_name_or_path: Any,
        core_attn_implementation: str | None = None,
        sequence_parallel_size: int = 1,
        micro_batch_size: int | None = None,
        seq_length: int | None = None,
        seq_length_is_variable: bool = True,
        disable_in_eval: bool = False,
        max_length: int | None = None,
    ) -> Any:
        """Makes a model attend to sequences that ranks share, and the groups. Every rank must call it.

        Args:
            model_name_or_path: The model, also one wrapped by PEFT; or the name of one that is made later, which
                ``deepspeed.initialize`` then takes.
            core_attn_implementation: What attends to whole sequences; None: what the model has.
            sequence_parallel_size: Ranks that share a sequence. 1: nothing happens.
            micro_batch_size: Sequences per pass, if the caller wants it checked; batches may have any size.
            seq_length: Tokens of whole sequences; must be a multiple of the ranks.
            seq_length_is_variable: False: ``seq_length`` must be given.
            disable_in_eval: In evaluation the model gets whole sequences.
            max_length: Older name of ``seq_length``.

        Returns:
            The mpu for ``deepspeed.initialize``; None for 1.

        Raises:
            DeepSpeedConfigError: The model cannot be shared in this way; nothing was changed.
        """
        if sequence_parallel_size == 1:
            return None
        length = seq_length if seq_length is not None else max_length
        if not seq_length_is_variable and length is None:
            raise DeepSpeedConfigError(
                "register_with_transformers(seq_length_is_variable=False): seq_length is missing; give the tokens of a "
                "whole sequence"
            )
        if length is not None and length % sequence_parallel_size:
            raise DeepSpeedConfigError(
                f"register_with_transformers: sequences of {length} tokens cannot be cut into {sequence_parallel_size} "
                f"equal parts; choose a multiple of {sequence_parallel_size}"
            )
        if size_of() % sequence_parallel_size:
            state.initialize_sequence_parallel(sequence_parallel_size)  # says so
        if not hasattr(model_name_or_path, "config"):
            _check_by_name(model_name_or_path, core_attn_implementation, sequence_parallel_size)
            state.initialize_sequence_parallel(sequence_parallel_size)
            _awaited.append((core_attn_implementation, disable_in_eval))
            return state
        state.initialize_sequence_parallel(sequence_parallel_size)
        share_sequences(
            model_name_or_path,
            groups.group_along("sequence"),
            core=core_attn_implementation,
            disable_in_eval=disable_in_eval,
        )
        return state


_awaited: list[tuple[str | None, bool]] = []
"""Models that were registered by name: ``(core, disable_in_eval)``, until ``initialize`` gets them."""


def _check_by_name(name: Any, core: str | None, ranks: int) -> None:
    from transformers import AutoConfig

    config: Any = AutoConfig.from_pretrained(name)
    core_of(config, core, f"sequence parallel for {name}")
    text = config.get_text_config()
    heads = text.num_attention_heads
    shares_of_heads(heads, getattr(text, "num_key_value_heads", None) or heads, ranks)


def adopt_model(model: nn.Module, group: Any) -> None:
    """Shares the sequences of a model that ``initialize`` got, if it is a Transformers model that was not registered.

    Args:
        model: The model.
        group: Torch process group of the ranks that share a sequence.

    Raises:
        DeepSpeedConfigError: The model cannot be shared in this way.
    """
    known = sharing_of(model)
    if known is not None or not hasattr(model, "set_attn_implementation"):
        return
    core, disable_in_eval = _awaited.pop() if _awaited else (None, False)
    share_sequences(model, group, core=core, disable_in_eval=disable_in_eval)
    found = sharing_of(model)
    assert found is not None
    log_dist(
        f"sequence parallel: {type(model).__name__} attends to sequences that {size_of(group)} ranks share "
        f"({found.core}); each rank's inputs are its own tokens of every sequence, with position_ids"
    )


def with_all_data_ranks(config: Any, mpu: Any) -> Any:
    """A configuration whose total batch counts all data ranks, where it was written by one who knew only of one.

    Accelerate computes ``train_batch_size`` from its own sizes, of which the number of data ranks may be left out.

    Args:
        config: As ``initialize`` got it.
        mpu: Likewise.
    """
    if mpu is not state or not isinstance(config, dict):
        return config
    data = state.get_data_parallel_world_size()
    total, *parts = (config.get(name) for name in (TOTAL, MICRO, ACCUMULATION))
    if data == 1 or not isinstance(total, int) or not all(isinstance(part, int) for part in parts):
        return config
    if total != math.prod(parts):  # type: ignore[arg-type]
        return config
    log_dist(
        f"{TOTAL} {total} counts one data-parallel rank, but there are {data} beside the ranks that share sequences; "
        f"it is taken as {total * data}"
    )
    return {**config, TOTAL: total * data}
