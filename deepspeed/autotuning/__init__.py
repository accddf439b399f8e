"""Autotuning: plans configurations of a script, measures the best of them, and saves the fastest one.

``deepspeed --autotuning tune|run script.py ...`` drives it (:class:`~deepspeed.autotuning.autotuner.Autotuner`).
``docs/design/autotuning.md`` describes how the command and the ranks of the script work together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepspeed.lazy import lazy_names

if TYPE_CHECKING:
    from deepspeed.autotuning.autotuner import Autotuner as Autotuner
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
