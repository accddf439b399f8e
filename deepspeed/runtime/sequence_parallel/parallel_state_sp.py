"""The module :mod:`deepspeed.parallel.sequence.state` under upstream's import path."""

import sys

from deepspeed.parallel.sequence.state import *  # noqa: F403  # for type checkers

sys.modules[__name__] = sys.modules["deepspeed.parallel.sequence.state"]
