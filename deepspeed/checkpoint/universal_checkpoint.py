"""Upstream's import path for names of ``checkpoint.upstream.files``."""

from deepspeed.lazy import TYPE_CHECKING, lazy_names

if TYPE_CHECKING:
    from deepspeed.checkpoint.upstream.files import SubparamShape as SubparamShape

lazy_names(__name__)
