"""``sequence_parallel``: how ranks share sequences. The whole section is this package's own, not upstream's."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from deepspeed.config.section import Section, key
from deepspeed.config.types import AnyCase, Bool, Int


class SequenceParallel(Section):
    """What the ranks of ``sequence_parallel_size`` do; not upstream, where there is no such section."""

    _feature: ClassVar[str] = "deepspeed.parallel.sequence.feature"

    mode: Annotated[Literal["ulysses", "ring", "both"], AnyCase] = key(
        "ulysses",
        'How Transformers models attend to shared sequences: "ulysses" exchanges tokens for heads; "ring" sends keys '
        'and values round the ranks, with no limit by heads; "both" does the first among as many neighbours as heads '
        "allow and the second between them.",
    )
    loss: Annotated[Literal["gathered", "own_share"], AnyCase] = key(
        "gathered",
        'What each rank back-propagates: "gathered", the loss of the whole sequence, which reached it through a '
        "collective whose backward sums over the ranks (the recipe of Accelerate and the Trainer, mean_loss), so "
        'that gradients are divided by all data and sequence ranks; "own_share", only its share of that loss, as '
        "older programs do, so that they are divided by the data ranks. Both give the gradient of the unsharded loss.",
    )
    evaluation: Annotated[Literal["logits", "loss", "whole"], AnyCase] = key(
        "logits",
        "How a causal Transformers model that was registered with disable_in_eval (Accelerate and the Trainer do so) "
        'evaluates whole sequences, of which every rank brings its own: "logits", the ranks share each of them in '
        "turn, and each gets the loss and the logits of its own; "
        '"loss", likewise, but with labels only the loss is returned, by tiles where tiled_loss is set; '
        '"whole", every rank computes its own, which is needed where not all ranks that share sequences evaluate.',
    )
    recompute_exchange: Bool = key(
        False,
        "Keep attention's result once for backward, by tokens, instead of by heads too, and exchange it once more "
        "there: a ninth exchange per layer and step for one activation of a layer's size less. In mode "
        '"ulysses", for layers that are not checkpointed; of packed documents and sliding windows both are kept.',
    )
    tiled_mlp: Bool = key(
        False,
        "Compute the MLPs of a Transformers model tile by tile along the sequence, again in backward; also without "
        "ranks that share sequences.",
    )
    tiled_loss: Bool = key(
        False,
        "Compute the loss of a causal Transformers model from its hidden states, so that logits exist for one tile of "
        "tokens at a time; its outputs then have a loss and no logits. Also without ranks that share sequences.",
    )
    tile_tokens: Int = key(2048, "Tokens of a tile.", unit="tokens", above=0)
    offload_checkpoints: Bool = key(
        False,
        "Checkpoint the layers of a Transformers model (as gradient_checkpointing_enable does) and keep what they save "
        "for backward, their inputs, in host memory; also without ranks that share sequences.",
    )
