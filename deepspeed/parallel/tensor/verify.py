"""One small forward and backward before the cut and one after it: a cut model computes what the whole one did.

A plan can be wrong for a model in ways that nothing else shows: a layer that must not be cut, packed parts in another
order, a number of heads that a module keeps to itself, a gradient that is not summed. Where the model is small enough,
outputs and the gradients of the parameters that stay whole are compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from deepspeed.comm.transports.channel import Channel
from deepspeed.config.sections.tensor_parallel import TensorParallel
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.logging import log_dist
from deepspeed.models.inputs import small_inputs
from deepspeed.parallel.tensor.layout import Layout
from deepspeed.uncompiled import without_compiling
from deepspeed.zero.address import full_numel
from deepspeed.zero.gather.sharded_parameter import ShardedParameter

BY_DEFAULT_BELOW = 300_000_000
"""Parameters of a model that is compared without being asked to."""
_ROWS, _LENGTH = 2, 8
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-9}
_COARSE = 0.1  # for 16-bit types, whose sums are rounded at every rank


@dataclass
class ConsistencyCheck:
    """A model's answers before the cut.

    Attributes:
        inputs: Keyword arguments of its forward.
        output: What it gave.
        gradients: Of parameters that stay whole, by name.
    """

    inputs: dict[str, Any]
    output: torch.Tensor
    gradients: dict[str, torch.Tensor]

    @classmethod
    def before(
        cls, model: nn.Module, layout: Layout, section: TensorParallel, device: torch.device
    ) -> ConsistencyCheck | None:
        """Asks the whole model; None where it is too large, sharded, elsewhere, or takes inputs that cannot be made up.

        Raises:
            DeepSpeedConfigError: ``verify`` is set, and the whole model cannot be asked.
        """
        if section.verify is False:
            return None
        why = _why_not(model, device, is_asked=bool(section.verify))
        inputs = None if why else inputs_of(model, layout.size if section.sequence_parallel_norms else 1)
        if inputs is None:
            why = why or f"what {type(model).__name__} takes as input is not known"
            if section.verify:
                raise DeepSpeedConfigError(f"tensor_parallel.verify: {why}; leave the key out, or set it to false")
            log_dist(f"tensor_parallel.verify: the cut model is not compared with the whole one, as {why}")
            return None
        if section.vocab_parallel_lm_head:
            inputs["labels"] = inputs["input_ids"]  # logits stay cut then, the loss does not
        cut = set(layout.parameters)
        whole = {n: p for n, p in model.named_parameters() if n not in cut and p.requires_grad}
        output, gradients = _ask(model, inputs, whole)
        return cls(inputs, output, gradients)

    def after(self, model: nn.Module, channel: Channel) -> None:
        """Asks the cut model and compares. All ranks that share its layers must call it, and decide alike.

        Raises:
            DeepSpeedConfigError: It computes something else.
        """
        by_name = dict(model.named_parameters())
        try:
            output, gradients = _ask(model, self.inputs, {name: by_name[name] for name in self.gradients})
        except (RuntimeError, ValueError, IndexError) as error:
            raise DeepSpeedConfigError(
                f"tensor_parallel.verify: the cut {type(model).__name__} cannot compute: {error}. A module keeps a "
                "size to itself that the cut has changed, or a layer must not be cut; see which by the traceback, and "
                'leave its layers whole with a layer_specs entry of partition_type "skip"'
            ) from error
        failure = _difference("its output", output, self.output, 0.0)
        # What is next to nothing beside the others (a bias of keys, which softmax takes out again) is rounding.
        typical = sorted(float(gradient.abs().max()) for gradient in self.gradients.values())
        least = 1e-3 * typical[len(typical) // 2] if typical else 0.0
        for name, expected in self.gradients.items():
            failure = failure or _difference(f"the gradient of {name!r}", gradients[name], expected, least)
        gathered = channel.transport.gather_small(
            torch.tensor([int(failure is not None)]), channel="call", label="the comparison of the cut model"
        )
        if bool(gathered.any()):
            found = failure or "another rank of the tensor group found a difference"
            raise DeepSpeedConfigError(
                f"tensor_parallel.verify: the cut {type(model).__name__} computes something else than the whole one: "
                f"{found}. The rules do not fit the model; write tensor_parallel.partition_config for it, with "
                'partition_type "skip" for the layers in question'
            )


def _why_not(model: nn.Module, device: torch.device, *, is_asked: bool) -> str:
    parameters = list(model.parameters())
    if any(isinstance(parameter, ShardedParameter) for parameter in parameters):
        return "it is sharded"
    numel = sum(map(full_numel, parameters))
    if not is_asked and numel > BY_DEFAULT_BELOW:
        return f"it has {numel:,} parameters (tensor_parallel.verify: true compares it all the same)"
    if {parameter.device.type for parameter in parameters} != {device.type}:
        return f"it is not on the device {device.type!r} yet"
    return ""


def inputs_of(model: nn.Module, multiple: int = 1) -> dict[str, Any] | None:
    """Returns a small input of a Transformers model, the same on all ranks; None where it is not known.

    Args:
        model: The model.
        multiple: Divides the length of its sequences.
    """
    return small_inputs(model, _ROWS, -(-_LENGTH // multiple) * multiple)


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Runs the block without dropout and without compiled code; restores random states and modes.

    A compiled forward keeps autograd nodes of the parameters with the shapes that they had before the cut.
    """
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.random.fork_rng(), without_compiling():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _ask(
    model: nn.Module, inputs: dict[str, Any], whole: dict[str, nn.Parameter]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Returns the model's output and the gradients of ``whole`` for a loss that looks at every element."""
    with _undisturbed(model), torch.enable_grad():
        result = model(**inputs)
        output = result if isinstance(result, torch.Tensor) else result[0]
        weights = torch.linspace(-1.0, 1.0, output.numel(), device=output.device).view(output.shape)
        loss = (output.float() * weights.cos()).sum()
        names = list(whole)
        found = torch.autograd.grad(loss, [whole[name] for name in names], allow_unused=True) if names else ()
        gradients = {n: g.detach().clone() for n, g in zip(names, found, strict=True) if g is not None}
    return output.detach().clone(), gradients


def _difference(what: str, found: torch.Tensor, expected: torch.Tensor, least: float) -> str | None:
    scale = max(float(expected.abs().max()), least)
    off = float((found.float() - expected.float()).abs().max())
    limit = _TOLERANCE.get(expected.dtype, _COARSE)
    if off <= limit * max(scale, 1e-6):
        return None
    return f"{what} is off by {off:.3g}, of values up to {scale:.3g}"
