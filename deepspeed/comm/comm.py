"""The module :mod:`deepspeed.comm` under upstream's import path."""

import sys

from deepspeed.comm import *  # noqa: F403  # for type checkers

sys.modules[__name__] = sys.modules["deepspeed.comm"]
