"""Upstream's import path for names of missing features."""

from deepspeed.lazy import TYPE_CHECKING, lazy_names

if TYPE_CHECKING:
    from deepspeed.compile.passes import sp_compile as sp_compile

lazy_names(__name__)
