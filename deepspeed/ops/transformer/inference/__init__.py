"""Upstream's import path for names of missing features."""

from deepspeed.lazy import TYPE_CHECKING, lazy_names

if TYPE_CHECKING:
    from deepspeed.ops.transformer.inference import config as config
    from deepspeed.ops.transformer.inference import diffusers_attention as diffusers_attention
    from deepspeed.ops.transformer.inference import diffusers_transformer_block as diffusers_transformer_block

lazy_names(__name__)
