"""Upstream's import path of the modules below it."""

from deepspeed.lazy import TYPE_CHECKING, lazy_names

if TYPE_CHECKING:
    from deepspeed.compile import passes as passes

lazy_names(__name__)
