"""``float8``: products of linear layers in eight bits."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from deepspeed.config.section import Section, key
from deepspeed.config.types import AnyCase, Bool, TextList


class Float8(Section):
    """Products of linear layers in float8, by torchao. Only here, not upstream."""

    _feature: ClassVar[str] = "deepspeed.fast_path.float8"

    enabled: Bool = key(True, "Compute linear layers in float8.")
    recipe: Annotated[Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"], AnyCase] = key(
        "tensorwise",
        "What has one scale: a tensor, or a row. rowwise_with_gw_hp: rows, and the gradient of the weight in the "
        "compute dtype.",
    )
    skip: TextList = key(
        None,
        "Layers whose name contains one of these parts stay in the compute dtype; in a pipeline of a Transformers "
        "model the names are the model's own.",
        factory=lambda: ["lm_head"],
    )
    emulate: Bool = key(False, "Multiply in the compute dtype after rounding to float8, on devices without float8.")
    gather: Annotated[Literal["none", "float8"], AnyCase] = key(
        "none",
        "How stage 3 sends these weights. none: in the compute dtype. float8: one byte per element, with the results "
        "of none bit for bit; for the recipe tensorwise and 16-bit weights.",
    )
