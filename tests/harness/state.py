"""Putting a worker process back as it was, so that one call cannot change the next."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable

import numpy as np
import torch

SEED = 1234


def _forget_logged_messages() -> None:
    logging = sys.modules.get("deepspeed.logging")
    if logging is not None:
        logging._seen.clear()


# Run after every call, in this order. State that a module of the package keeps per process gets a line here.
RESET_HOOKS: list[Callable[[], None]] = [_forget_logged_messages]


class ProcessState:
    """What a call may change and the next one must find unchanged."""

    def __init__(self) -> None:
        self.environ = dict(os.environ)
        self.directory = os.getcwd()

    def restore(self) -> None:
        """Resets environment, directory and torch's global switches, then runs the hooks."""
        for name in set(os.environ) - set(self.environ):
            del os.environ[name]
        os.environ.update(self.environ)
        os.chdir(self.directory)
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
        torch.set_grad_enabled(True)
        torch.autograd.set_detect_anomaly(False)
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision("highest")
        torch.set_autocast_enabled("cpu", False)
        torch.set_num_threads(1)
        for hook in RESET_HOOKS:
            hook()

    @staticmethod
    def seed() -> None:
        """The same seed on every rank, as models must start equal; data is the test's own affair."""
        random.seed(SEED)
        np.random.seed(SEED)
        torch.manual_seed(SEED)
