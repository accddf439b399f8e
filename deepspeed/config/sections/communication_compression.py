"""``communication_compression``: values that travel between ranks in fewer bits. This package's own, not upstream's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, TypeAlias

from deepspeed.config.codec_names import GRADIENT_CODECS, PLAIN_CODECS
from deepspeed.config.section import Section, key
from deepspeed.config.types import AnyCase, Bool, Float, Int

if TYPE_CHECKING:  # which knows no Literal of names that are listed elsewhere
    Gradients: TypeAlias = str
    WarmUp: TypeAlias = str
    Wire: TypeAlias = str
else:
    Gradients = Literal[(*GRADIENT_CODECS, "auto")]
    WarmUp = Literal[PLAIN_CODECS]
    Wire = Literal[("fp32", "bf16", *PLAIN_CODECS)]


class Islands(Section):
    """Groups of neighbouring ranks that train alone and meet every so many updates (DiLoCo)."""

    _feature: ClassVar[str] = "deepspeed.engine.islands"

    size: Int = key(1, "Ranks of an island; divides the data-parallel ranks.", unit="ranks", above=0)
    sync_every: Int = key(100, "Updates between two meetings, skipped ones included.", unit="updates", above=0)
    outer_lr: Float = key(0.7, "Learning rate of the outer step, SGD on the mean of what islands moved.", above=0)
    outer_momentum: Float = key(0.9, "Nesterov's momentum of the outer step.", minimum=0, below=1)
    wire: Annotated[Wire, AnyCase] = key("fp32", "How that mean travels between islands.")


class CommunicationCompression(Section):
    """Codes of gradients and weights, for any optimizer; not upstream, where there is no such section."""

    gradients: Annotated[Gradients | None, AnyCase] = key(
        None,
        'How gradients travel: "sign" (a bit for each, and a scale for each block), "int8" or "int4". Every rank gets '
        'the same sums. "auto" measures the link at initialize and takes int8, int4 or neither; what seems to pay is '
        "tried in turn with plain gradients in the first 15 updates, and the faster way stays. Not with "
        "zero_quantized_gradients.",
        own_auto=True,
        null_means="as they are",
    )
    weights: Annotated[Literal["int8"] | None, AnyCase] = key(
        None,
        "How parameters travel that stage 3 gathers for their uses; all ranks compute with the same decoded values, "
        "and masters stay exact. Not with zero_quantized_weights.",
        null_means="as they are",
    )
    error_feedback: Bool | None = key(
        None,
        "Add what the codes of a gradient do not say to the next one; costs 4 bytes an element on each rank, and 4 "
        "more where a step may be skipped.",
        null_means='with "sign" and "int4", not with "int8"',
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
        0, "Updates before gradients travel as codes; until then they travel as they are.", unit="steps", minimum=0
    )
    warm_up: Annotated[WarmUp | None, AnyCase] = key(
        None,
        "How gradients travel before start_step, and in the warm-up of OneBitAdam and OneBitLamb; without error "
        "feedback.",
        null_means="as they are",
    )
    islands: Islands | None = key(
        None,
        "Train in islands that meet seldom. The other keys say how values travel inside an island.",
        null_means="all ranks agree at every update",
    )
