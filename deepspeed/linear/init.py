"""Replaces the linear layers of models built in a context by frozen bases with adapters: :class:`LoRAInit`."""

from __future__ import annotations

import weakref
from collections import Counter
from types import TracebackType
from typing import Any

from torch import nn

from deepspeed.errors import CallOrderError
from deepspeed.linear.config import LoRAConfig, QuantizationConfig
from deepspeed.linear.optimized_linear import LoRAOptimizedLinear, optimized
from deepspeed.linear.quantize import names_of_modules, quantize_model
from deepspeed.logging import log_dist


class LoRAInit:
    """A context for building a model to be fine-tuned, from its class, ``from_config`` or ``from_pretrained``.

    ::

        with deepspeed.linear.Init(lora_config=LoRAConfig(), quant_config=QuantizationConfig()):
            model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)

    At the end of the context, linear layers with one of ``lora_config.target_mods`` in their names are replaced by
    :class:`LoRAOptimizedLinear`, and everything but their adapters is frozen. Without ``lora_config`` all linear layers
    are quantized. The model keeps its values.
    """

    def __init__(self, lora_config: LoRAConfig | None = None, quant_config: QuantizationConfig | None = None) -> None:
        self._lora, self._quant = lora_config, quant_config
        self._built: list[weakref.ref[nn.Module]] = []
        self._original_init: Any = None

    def __enter__(self) -> LoRAInit:
        if self._original_init is not None:
            raise CallOrderError(
                "deepspeed.linear.Init: this context is open already; leave out the inner with statement"
            )
        original, built = nn.Module.__init__, self._built

        def init_and_record(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            original(module, *args, **kwargs)
            built.append(weakref.ref(module))

        self._original_init = original
        nn.Module.__init__ = init_and_record  # type: ignore[method-assign, assignment]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        nn.Module.__init__ = self._original_init  # type: ignore[method-assign]
        self._original_init = None
        found = [module for ref in self._built if (module := ref()) is not None]
        self._built.clear()
        if error is None:
            inside = {id(child) for module in found for child in module.children()}
            for module in found:
                if id(module) not in inside:
                    optimize_model(module, self._lora, self._quant)


Init = LoRAInit  # the public name, ``deepspeed.linear.Init``


def optimize_model(
    model: nn.Module, lora_config: LoRAConfig | None = None, quant_config: QuantizationConfig | None = None
) -> nn.Module:
    """Does what :class:`LoRAInit` does, in place, to a model that exists; returns it.

    Args:
        model: Has ``torch.nn.Linear`` layers in it. Layers with tied weights are not replaced.
    """
    if lora_config is None:
        if quant_config is not None:
            log_dist(quantize_model(model, bits=quant_config.q_bits, group_size=quant_config.group_size).line())
        return model
    model.requires_grad_(False)
    users = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    count = 0
    aliases = names_of_modules(model)
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and name and any(part in name for part in lora_config.target_mods):
            if users[id(module.weight)] == 1:
                layer = optimized(module, lora_config, quant_config)
                for each in aliases[id(module)]:
                    model.set_submodule(each, layer)
                count += 1
    log_dist(
        f"deepspeed.linear: {count} layers with adapters of rank {lora_config.lora_r}; all other parameters are frozen"
    )
    return model


def init_lora(model: nn.Module) -> None:
    """Makes the adapters that ``delay_lora_init`` left out, in all layers of ``model``. Call before ``initialize``."""
    for module in model.modules():
        if isinstance(module, LoRAOptimizedLinear) and module.lora_weight_1 is None:
            module.init_lora()
