"""Upstream's import path for names of missing features."""

from deepspeed.lazy import TYPE_CHECKING, lazy_names

if TYPE_CHECKING:
    from deepspeed.inference.v2 import config_v2 as config_v2
    from deepspeed.inference.v2 import engine_factory as engine_factory
    from deepspeed.inference.v2 import engine_v2 as engine_v2
    from deepspeed.inference.v2 import inference_utils as inference_utils
    from deepspeed.inference.v2 import ragged as ragged

lazy_names(__name__)
