"""Sequence parallelism as Accelerate, the Trainer and training scripts ask for it (ALST, arXiv 2506.13996)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import nn

from deepspeed.activation_checkpointing.attention import offers_recomputation
from deepspeed.comm.job import groups
from deepspeed.comm.job.job import Job
from deepspeed.comm.job.mesh import SEQUENCE, TENSOR, Mesh
from deepspeed.comm.job.world import backend_of, size_of
from deepspeed.comm.start.process_group import default_timeout
from deepspeed.config.batch import ACCUMULATION, MICRO, TOTAL
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.logging import log_dist
from deepspeed.models.attention import takes_attention_by_name
from deepspeed.models.building import read_configuration
from deepspeed.models.configurations import heads_of, kv_heads_of, name_or_path_of
from deepspeed.parallel.sequence import state
from deepspeed.parallel.sequence.context import sharing_of
from deepspeed.parallel.sequence.evaluation import share_evaluation
from deepspeed.parallel.sequence.head_assignment import shares_of_heads
from deepspeed.parallel.sequence.transformers_models import core_of, sequence_model_in, share_layers, share_sequences
from deepspeed.parallel.sequence.unshared import check_first_forward


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
            _awaited.append(_RegisteredName(str(model_name_or_path), core_attn_implementation, disable_in_eval))
            return state
        state.initialize_sequence_parallel(sequence_parallel_size)
        share_sequences(
            model_name_or_path,
            groups.group_along("sequence"),
            core=core_attn_implementation,
            disable_in_eval=disable_in_eval,
        )
        return state


@dataclass(frozen=True)
class _RegisteredName:
    """The settings of a model that was registered by name.

    Attributes:
        name: The hub id or folder that the program gave.
        core: The implementation that attends to whole sequences.
        disable_in_eval: In evaluation the model is left to itself, with whole sequences on each rank.
    """

    name: str
    core: str | None
    disable_in_eval: bool


_awaited: list[_RegisteredName] = []
"""Models that were registered by name, in order, until ``initialize`` gets them."""


def _settings_of(model: Any) -> tuple[str | None, bool]:
    """Returns ``(core, disable_in_eval)`` of a model that may have been registered by name, and forgets the entry.

    A model is recognised by the name that it was loaded by. One with another name gets the settings of the only entry,
    or those on which all entries agree.

    Raises:
        DeepSpeedConfigError: Several names were registered with different settings, and none is this model's.
    """
    if not _awaited:
        return None, False
    name = name_or_path_of(model)
    found = next((entry for entry in _awaited if entry.name == name), None)
    if found is None and len({(entry.core, entry.disable_in_eval) for entry in _awaited}) > 1:
        names = ", ".join(repr(entry.name) for entry in _awaited)
        raise DeepSpeedConfigError(
            f"initialize(model=<{type(model).__name__}>): expected a model loaded by one of the names that "
            "UlyssesSPAttentionHF.register_with_transformers got with different settings "
            f"({names}), found one of the name {name!r}. Register the model itself: "
            "register_with_transformers(model_name_or_path=<the model>, ...)"
        )
    found = found or _awaited[0]
    _awaited.remove(found)
    return found.core, found.disable_in_eval


def _check_by_name(name: Any, core: str | None, ranks: int) -> None:
    config = read_configuration(name)
    core_of(config, core, f"sequence parallel for {name}")
    heads, kv_heads = heads_of(config), kv_heads_of(config)
    if heads is not None and kv_heads is not None:
        shares_of_heads(heads, kv_heads, ranks)


def adopt_model(
    model: nn.Module,
    group: Any,
    mesh: Mesh,
    mode: str,
    evaluation: str = "whole",
    *,
    recompute_exchange: bool = False,
    whole: nn.Module | None = None,
) -> None:
    """Shares the sequences of a Transformers model that ``initialize`` got, in the way that the configuration says.

    Every rank of the job must call it. A model that was not registered is registered here, also one inside a module of
    one's own, and the layers of one in a pipeline. What has no Transformers model in it is left to its own code; its
    first forward must exchange tokens.

    Args:
        model: The model.
        group: Torch process group of the ranks that share a sequence.
        mesh: Of the job.
        mode: ``sequence_parallel.mode``.
        evaluation: ``sequence_parallel.evaluation``.
        recompute_exchange: ``sequence_parallel.recompute_exchange``.
        whole: The Transformers model of which ``model``, a pipeline, has layers; None: it has all that there is.

    Raises:
        DeepSpeedConfigError: The model cannot be shared in this way.
    """
    if recompute_exchange and mode != "ulysses":
        raise DeepSpeedConfigError(
            f'sequence_parallel.recompute_exchange with mode "{mode}": ring attention keeps its result in '
            'another order of tokens; set recompute_exchange to false, or mode to "ulysses"'
        )
    if whole is None:
        model = whole = sequence_model_in(model)
    if sharing_of(model) is None and not takes_attention_by_name(whole):
        if mode != "ulysses":
            raise DeepSpeedConfigError(
                f'sequence_parallel.mode "{mode}": {type(model).__name__} is no Transformers model, so its own code '
                "says how it attends (deepspeed.sequence.ring_attention); leave the key out"
            )
        if recompute_exchange:
            raise DeepSpeedConfigError(
                f"sequence_parallel.recompute_exchange: {type(model).__name__} is no Transformers model; give its "
                "DistributedAttention recompute_exchange=True, and leave the key out"
            )
        if not getattr(model, "is_part_of_model", False):  # a stage of a pipeline may have no attention
            check_first_forward(model, group, mesh.size(SEQUENCE))
        return
    if sharing_of(model) is None:
        core, disable_in_eval = _settings_of(whole)
        if whole is model:
            share_sequences(model, group, core=core, disable_in_eval=disable_in_eval)
        else:
            share_layers(model, whole, group, core=core, disable_in_eval=disable_in_eval)
    found = sharing_of(model)
    assert found is not None
    ranks = mesh.size(SEQUENCE)
    found.recompute_exchange = recompute_exchange
    found.heads_group, found.ring_group = _groups_of_mode(whole, group, mesh, mode)
    if found.disable_in_eval and evaluation != "whole":
        share_evaluation(model, found, keeps_logits=evaluation == "logits")
    by_ring = 1 if found.ring_group is None else size_of(found.ring_group)
    log_dist(
        f"sequence parallel: {type(whole).__name__} attends to sequences that {ranks} ranks share (heads divided over "
        f"{ranks // by_ring}, keys and values passed around rings of {by_ring}); each rank's inputs are its own "
        "tokens of every sequence, with position_ids"
    )


def recompute_between_exchanges(model: nn.Module) -> None:
    """Lets a registered model attend once more in backward, between the exchanges of tokens, which are made once.

    Raises:
        DeepSpeedConfigError: The model is not registered and offers nothing itself, or attends round the ranks.
    """
    key = "activation_checkpointing.recompute_modules"
    found = next((one for module in model.modules() if (one := sharing_of(module)) is not None), None)
    if found is None:
        if getattr(model, "is_part_of_model", False) or offers_recomputation(model):
            return
        raise DeepSpeedConfigError(
            f"{key} where ranks share sequences: expected a Transformers model, or modules with a method "
            f"recompute_core_attention, found {type(model).__name__}. Call deepspeed.checkpointing.checkpoint in its "
            "own code, or leave the key out"
        )
    if found.ring_group is not None:
        raise DeepSpeedConfigError(
            f"{key}: attention round the ranks (sequence_parallel.mode) keeps no scores, and would send keys and "
            'values again in backward; leave the key out, or set the mode to "ulysses"'
        )
    if found.recompute_exchange:
        log_dist(f"sequence_parallel.recompute_exchange has no effect beside {key}: attention's result is not kept")
    found.recompute_core = True


def _groups_of_mode(model: Any, group: Any, mesh: Mesh, mode: str) -> tuple[Any, Any]:
    """Returns the group that divides heads, and the one around which keys and values go."""
    if mode == "ring":
        return None, group
    heads, key_heads = heads_of(model.config), kv_heads_of(model.config)
    if heads is None or key_heads is None:
        return group, None
    cut = mesh.size(TENSOR)  # which divides heads too
    heads, key_heads = max(heads // cut, 1), max(key_heads // cut, 1)
    ranks = mesh.size(SEQUENCE)
    width = math.gcd(ranks, key_heads) if mode == "both" else ranks
    shares_of_heads(heads, key_heads, width)
    if width == ranks:
        return group, None
    if width == 1:
        return None, group
    split = mesh.split(SEQUENCE, "ring", ("heads", width))
    made = [
        Job.current().process_groups.mine(
            split.groups(axis),
            backend=backend_of(),
            timeout=default_timeout(),
            why=f"attention along {axis}",
            owner="job",
        )
        for axis in ("heads", "ring")
    ]
    return made[0], made[1]


def with_all_data_ranks(config: Any, mpu: Any) -> Any:
    """A configuration whose total batch counts all data ranks, where it was written by one who knew only of one.

    Accelerate computes ``train_batch_size`` from its own sizes, of which the number of data ranks may be left out.

    Args:
        config: As ``initialize`` got it.
        mpu: The ``mpu`` that ``initialize`` got.
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
