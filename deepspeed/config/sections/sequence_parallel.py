"""``sequence_parallel``: how ranks share sequences. The whole section is this package's own, not upstream's."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from deepspeed.config.section import Section, key
from deepspeed.config.types import AnyCase, Bool, Int


class SequenceParallel(Section):
    """Controls how the ranks of ``sequence_parallel_size`` share sequences. Upstream has no such section."""

    _feature: ClassVar[str] = "deepspeed.parallel.sequence.feature"

    mode: Annotated[Literal["ulysses", "ring", "both"], AnyCase] = key(
        "ulysses",
        'How attention of Transformers models works on sharded sequences. "ulysses": all-to-all from tokens to '
        'heads. "ring": keys and values pass around the ranks, without a limit by the number of heads. "both": '
        "ulysses among as many neighbours as the heads allow, ring between these groups.",
    )
    loss: Annotated[Literal["gathered", "own_share"], AnyCase] = key(
        "gathered",
        'What each rank back-propagates. "gathered": the loss of the whole sequence, gathered by a collective '
        "whose backward sums over the ranks (the recipe of Accelerate and the Trainer, mean_loss); gradients are "
        'divided by the number of data and sequence ranks. "own_share": only its share of that loss, as older '
        "programs do; gradients are divided by the number of data ranks. Both give the gradient of the unsharded "
        "loss.",
    )
    evaluation: Annotated[Literal["logits", "loss", "whole"], AnyCase] = key(
        "logits",
        "How a causal Transformers model that was registered with disable_in_eval (Accelerate and the Trainer do "
        'so) evaluates; every rank has a whole sequence of its own. "logits": the ranks divide each of these '
        'sequences in turn, and each gets the loss and the logits of its own. "loss": the same, but with labels '
        'only the loss is returned, by tiles if tiled_loss is set. "whole": every rank computes its own sequence;'
        " needed if not all of the sequence ranks evaluate.",
    )
    recompute_exchange: Bool = key(
        False,
        "Keep the output of attention for backward only by tokens, not by heads too, and exchange it once more in"
        ' backward: one activation of a layer less, for a ninth exchange per layer and step. For mode "ulysses" '
        "and layers that are not checkpointed; with packed documents and sliding windows both are kept.",
    )
    tiled_mlp: Bool = key(
        False,
        "Compute the MLPs of a Transformers model tile by tile along the sequence, and recompute them in "
        "backward. Works without sequence ranks too.",
    )
    tiled_loss: Bool = key(
        False,
        "Compute the loss of a causal Transformers model from its hidden states, so that logits exist for one "
        "tile of tokens at a time. The outputs then have a loss and no logits. Works without sequence ranks too.",
    )
    tile_tokens: Int = key(2048, "Tokens of a tile.", unit="tokens", above=0)
    offload_checkpoints: Bool = key(
        False,
        "Checkpoint the layers of a Transformers model (as gradient_checkpointing_enable does) and keep their "
        "saved inputs in host memory. Works without sequence ranks too.",
    )
