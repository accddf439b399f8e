"""Autotuning: plans configurations of a script, measures the best of them, and saves the fastest one.

``deepspeed --autotuning tune|run script.py ...`` drives it (:class:`~deepspeed.autotuning.autotuner.Autotuner`).
``docs/design/autotuning.md`` describes how the command and the ranks of the script work together.
"""

from deepspeed.lazy import TYPE_CHECKING, lazy_names

if TYPE_CHECKING:
    from deepspeed.autotuning.autotuner import Autotuner as Autotuner

lazy_names(__name__)
