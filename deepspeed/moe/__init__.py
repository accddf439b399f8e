"""Upstream's import path of the modules below it."""

from deepspeed.lazy import TYPE_CHECKING, lazy_names

if TYPE_CHECKING:
    from deepspeed.moe import ep_experts as ep_experts
    from deepspeed.moe import experts as experts
    from deepspeed.moe import layer as layer
    from deepspeed.moe import sharded_moe as sharded_moe
    from deepspeed.moe import utils as utils

lazy_names(__name__)
