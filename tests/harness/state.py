"""Restores the state of a worker process after a call, so that one call cannot affect the next."""

import gc
import os
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

SEED = 1234


def _package_hook(module: str, restore: Callable[[Any], None]) -> Callable[[], None]:
    """A hook that restores a module of the package if the process has loaded it."""

    def hook() -> None:
        if module in sys.modules:
            restore(sys.modules[module])

    return hook


def _checkpointing(module: Any) -> None:
    module.settings = module.Settings()


# Run after every call, in this order. State that a module of the package keeps per process gets a line here.
RESET_HOOKS: list[Callable[[], None]] = [
    _package_hook("deepspeed.logging", lambda module: module._seen.clear()),
    # The Trainer of transformers sets the level of the package's logger to its own.
    _package_hook("deepspeed.logging", lambda module: module.logger.setLevel(module._LEVELS["info"])),
    _package_hook("deepspeed.accelerator.selection", lambda module: setattr(module, "_current", None)),
    _package_hook("deepspeed.comm.base.recorder", lambda module: module.log.__init__()),
    _package_hook("deepspeed.comm.job.job", lambda module: module.Job.adopt().close()),
    _package_hook("deepspeed.parallel.sequence.context", lambda module: module._by_config.clear()),
    _package_hook("deepspeed.parallel.sequence.ulysses", lambda module: module._awaited.clear()),
    _package_hook("deepspeed.activation_checkpointing.checkpointing", _checkpointing),
]


class ProcessState:
    """What a call may change and the next one must find unchanged."""

    def __init__(self) -> None:
        self.environ = dict(os.environ)
        self.directory = os.getcwd()
        self._modules = 0

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
        if torch.are_deterministic_algorithms_enabled():  # setting it imports the compiler, which takes seconds
            torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision("highest")
        torch.set_autocast_enabled("cpu", False)
        torch.set_num_threads(1)
        for hook in RESET_HOOKS:
            hook()

    def collect(self) -> None:
        """Collects garbage that the call left behind.

        What modules hold stays for ever, so it is looked through once, when they are new: with the libraries of every
        test loaded, that takes half a second, longer than most calls.
        """
        gc.collect()
        if len(sys.modules) != self._modules:
            self._modules = len(sys.modules)
            gc.freeze()

    @staticmethod
    def seed() -> None:
        """Sets the same seed on every rank, because models must start equal. Tests seed their data themselves."""
        random.seed(SEED)
        np.random.seed(SEED)
        if torch.accelerator.is_available():
            torch.manual_seed(SEED)
        else:
            torch.default_generator.manual_seed(SEED)  # the same, without a question to each kind of device
