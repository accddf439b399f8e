"""Saves and loads checkpoints, which any stage, number of ranks and parallel layout can read."""

from deepspeed.checkpoint.constants import *  # noqa: F403
from deepspeed.lazy import TYPE_CHECKING, lazy_names

if TYPE_CHECKING:
    from deepspeed.checkpoint import constants as constants
    from deepspeed.checkpoint import reshape_3d_utils as reshape_3d_utils
    from deepspeed.checkpoint import reshape_meg_2d as reshape_meg_2d
    from deepspeed.checkpoint import reshape_utils as reshape_utils
    from deepspeed.checkpoint import universal_checkpoint as universal_checkpoint
    from deepspeed.checkpoint import utils as utils
    from deepspeed.checkpoint import zero_checkpoint as zero_checkpoint
    from deepspeed.checkpoint.deepspeed_checkpoint import DeepSpeedCheckpoint as DeepSpeedCheckpoint
    from deepspeed.checkpoint.names import get_layer_ckpt_name_for_rank as get_layer_ckpt_name_for_rank
    from deepspeed.checkpoint.names import get_model_ckpt_name_for_rank as get_model_ckpt_name_for_rank
    from deepspeed.checkpoint.names import get_zero_ckpt_name_for_rank as get_zero_ckpt_name_for_rank
    from deepspeed.checkpoint.upstream.files import SubparamShape as SubparamShape

lazy_names(__name__, [name for name in list(globals()) if name.isupper() and name != "TYPE_CHECKING"])
