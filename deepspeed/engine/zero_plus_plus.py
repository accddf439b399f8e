"""ZeRO++: which codecs the keys of ``zero_optimization`` ask for (arXiv 2306.10209; LoCo: arXiv 2407.04480).

qwZ is a codec on the gathers of parameters, qgZ one on both halves of a reduction (between the ranks that share slices,
then between those that hold the same ones), hpZ the placement with neighbours. Each is independent of the others.
"""

from __future__ import annotations

from deepspeed.comm.codecs.codec import Codec
from deepspeed.comm.codecs.table import Int4Codec, Int8Codec, LocoCodec
from deepspeed.config.sections.zero import ZeroOptimization
from deepspeed.logging import log_dist
from deepspeed.zero.group import Groups


def use_zero_plus_plus(groups: Groups, zero: ZeroOptimization) -> Groups:
    """The groups with the codecs that the section asks for; the same groups without any. Every rank must call it.

    Args:
        groups: Of the engine.
        zero: The section, without contradictions.
    """
    if zero.stage < 3:
        return groups
    weights: Codec | None = Int8Codec(feeds_back=False) if zero.zero_quantized_weights else None
    frozen: Codec | None = Int8Codec(feeds_back=False) if zero.zero_quantized_nontrainable_weights else None
    gradients = _gradient_codec(zero)
    if weights is None and frozen is None and gradients is None:
        return groups
    names = [
        "all weights" if weights else "frozen weights" if frozen else "",
        "gradients" if gradients is not None else "",
    ]
    kinds = {"all weights": "8 bits", "frozen weights": "8 bits", "gradients": "4 bits"}
    log_dist("ZeRO++: " + ", ".join(f"{what} are sent in {kinds[what]}" for what in names if what))
    present = next(iter(groups))  # what communication_compression asks for beside
    return groups.coded(
        weights or present.gather_codec,
        gradients or present.reduce_codec,
        frozen=weights or frozen or present.frozen_codec,
        early=present.early_codec,
    )


def _gradient_codec(zero: ZeroOptimization) -> Codec | None:
    if not zero.zero_quantized_gradients:
        return None
    loco = zero.zeropp_loco_param
    if loco is None:
        return Int4Codec(feeds_back=False)
    assert loco.err_beta is not None
    return LocoCodec(loco.err_beta)


def steps_until_reset(zero: ZeroOptimization) -> int:
    """Updates after which LoCo forgets what was lost; 0: never."""
    loco = zero.zeropp_loco_param
    return (loco.reset_T or 0) if zero.stage == 3 and loco is not None else 0
