"""``communication_compression``: values that are sent in fewer bits. This package's own, not upstream's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, TypeAlias

from deepspeed.config.codec_names import GRADIENT_CODECS, PLAIN_CODECS
from deepspeed.config.section import Section, key
from deepspeed.config.types import AnyCase, Bool, Float, Int

if TYPE_CHECKING:  # which supports no Literal of names that are listed elsewhere
    Gradients: TypeAlias = str
    WarmUp: TypeAlias = str
    Wire: TypeAlias = str
else:
    Gradients = Literal[(*GRADIENT_CODECS, "auto")]
    WarmUp = Literal[PLAIN_CODECS]
    Wire = Literal[("fp32", "bf16", *PLAIN_CODECS)]


class Islands(Section):
    """Groups of neighboring ranks that train by themselves and synchronize every ``sync_every`` updates (DiLoCo)."""

    _feature: ClassVar[str] = "deepspeed.engine.islands"

    size: Int = key(1, "Ranks of an island; must divide the number of data-parallel ranks.", unit="ranks", above=0)
    sync_every: Int = key(100, "Updates between two outer steps, skipped ones included.", unit="updates", above=0)
    outer_lr: Float = key(0.7, "Learning rate of the outer step: SGD on the mean of the islands' movements.", above=0)
    outer_momentum: Float = key(0.9, "Nesterov momentum of the outer step.", minimum=0, below=1)
    wire: Annotated[Wire, AnyCase] = key("fp32", "How that mean is sent between islands.")


class CommunicationCompression(Section):
    """Gradients and weights sent in fewer bits, for any optimizer. Upstream has no such section."""

    gradients: Annotated[Gradients | None, AnyCase] = key(
        None,
        'How gradients are sent: "sign" (one bit per element and a scale per block), or integers of 8 or 4 bits. '
        'Every rank gets the same sums. "auto" measures the network at initialize. If int8 or int4 seems faster than '
        "uncompressed gradients, both are tried in turn in the first 15 updates, and the faster one is kept. Not with "
        "zero_quantized_gradients.",
        own_auto=True,
        null_means="uncompressed",
    )
    weights: Annotated[Literal["int8"] | None, AnyCase] = key(
        None,
        "How stage 3 sends the parameters that it gathers. All ranks compute with the same decoded values, and "
        "master weights stay exact. Not with zero_quantized_weights.",
        null_means="uncompressed",
    )
    error_feedback: Bool | None = key(
        None,
        "Add the coding error of a gradient to the next one. Costs 4 bytes per element on each rank, and 4 more if a "
        "step may be skipped (bf16.check_grad_overflow, true by default, or loss scaling).",
        null_means='false with "int8", else true',
    )
    block: Int | None = key(
        None,
        "Elements of gradients with one scale, of 4 bytes: a power of 2 from 8 to 262144.",
        unit="elements",
        minimum=8,
        maximum=262144,
        null_means='2048 with "sign", else 256',
    )
    start_step: Int = key(
        0, "Updates before compression begins; until then gradients are sent as warm_up says.", unit="steps", minimum=0
    )
    warm_up: Annotated[WarmUp | None, AnyCase] = key(
        None,
        "How gradients are sent before start_step, and in the warm-up of OneBitAdam and OneBitLamb; without error "
        "feedback.",
        null_means="uncompressed",
    )
    islands: Islands | None = key(
        None,
        "Train in islands that synchronize every sync_every updates (DiLoCo). The other keys of this section "
        "apply inside an island.",
        null_means="no islands: all ranks synchronize at every update",
    )
