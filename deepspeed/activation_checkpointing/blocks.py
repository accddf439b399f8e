"""Activation checkpointing of a model's repeated blocks, without a change of its code."""

from __future__ import annotations

import functools

from torch import nn

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.models.checkpointing import switch_of


class BlockCheckpointing:
    """Lets every repeated block keep its inputs only, and run again during backward; and takes it back.

    A model of transformers does it itself; elsewhere the children of each ``ModuleList`` are the blocks.

    Raises:
        DeepSpeedConfigError: There is no repeated block.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._blocks: list[nn.Module] = []
        if switch_of(model, "enable") is not None:
            return
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
        self._blocks = [block for blocks in lists for block in blocks if next(block.parameters(), None) is not None]
        if not self._blocks:
            raise DeepSpeedConfigError(
                "activation checkpointing of blocks: expected a model with repeated blocks (children of a ModuleList), "
                f"found none in {type(model).__name__}; call deepspeed.checkpointing.checkpoint in its forward instead"
            )

    def on(self) -> None:
        """Switches it on.

        Raises:
            DeepSpeedConfigError: The model refuses.
        """
        if switch_of(self._model, "enable") is not None:
            self._model.train()
            self._call_own("enable")
            return
        from torch.utils.checkpoint import checkpoint

        for block in self._blocks:
            checkpointed = functools.partial(checkpoint, block.forward, use_reentrant=False)
            block.forward = checkpointed  # type: ignore[method-assign]

    def off(self) -> None:
        """Restores the model to its state before :meth:`on`.

        Raises:
            DeepSpeedConfigError: The model cannot do that.
        """
        if switch_of(self._model, "enable") is not None:
            self._call_own("disable")
            return
        for block in self._blocks:
            block.forward = block.forward.args[0]  # type: ignore[method-assign, attr-defined]

    def _call_own(self, verb: str) -> None:
        method = switch_of(self._model, verb)
        try:
            if method is None:
                raise AttributeError(f"it has no gradient_checkpointing_{verb}")
            method()
        except Exception as error:  # whatever the model's own code raises
            raise DeepSpeedConfigError(
                f"activation checkpointing: {type(self._model).__name__} cannot {verb} it: {error}"
            ) from error
