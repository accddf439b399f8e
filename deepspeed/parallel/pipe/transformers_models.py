"""Decoder-only Transformers models as rows of layers, without a line of the model written anew.

The model's own forward runs once per micro-batch with its blocks replaced by recorders: that gives what each block is
called with (masks, positions, rotary tables), whatever the family computes for it. The blocks then run one by one, on
whichever stage has them, with what was recorded, which travels along. The last layer runs the causal model's own
forward around a decoder that only hands over what the blocks have made, so what a family does to its logits is done.

The row is: token embedding, everything before the blocks, the blocks, the last norm (and what follows it), the head. A
head that shares the embedding's weight is tied to it.

Where a mixture of experts counts its routers in the loss (``output_router_logits``), what they said travels along too,
and the model's own forward makes its balance loss of it at the head; its gradient goes back the same way.
"""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from deepspeed.errors import DeepSpeedConfigError, NotYetSupportedError
from deepspeed.models.anatomy import anatomy, base_prefix_of
from deepspeed.models.configurations import counts_routers, longest_sequence_of
from deepspeed.parallel.pipe.spec import LayerSpec, TiedLayerSpec

_IGNORED = -100  # labels that do not count


def layers_of(model_or_config: Any) -> list[Any]:
    """The row of layers of a causal language model.

    Args:
        model_or_config: The model, whose values are kept, or its configuration: then a stage builds its layers only.

    Raises:
        DeepSpeedConfigError: It is neither.
        NotYetSupportedError: The model is built otherwise than decoder-only models are.
    """
    if isinstance(model_or_config, nn.Module):
        plan = _Plan(model_or_config, model_or_config)
    elif hasattr(model_or_config, "model_type"):
        plan = _Plan(_skeleton(model_or_config), None)
    else:
        raise DeepSpeedConfigError(
            f"from_transformers: expected a causal language model of Transformers or its configuration, found "
            f"{type(model_or_config).__name__}"
        )
    return plan.layers()


def next_token_loss(outputs: Any, labels: Any) -> Any:
    """Cross entropy of each token by those before it; labels of -100 do not count, as in Transformers.

    Args:
        outputs: Logits ``(batch, length, vocabulary)``; where routers count, those and the balance loss, 0-dim.
        labels: ``(batch, length)``, of the same tokens: they are shifted here. Or ``{"shift_labels": ...}``, likewise,
            of each token's next one.

    Returns:
        The loss, 0-dim; where routers count ``(loss, metrics)``, which tell both parts of the loss.
    """
    logits, balance = outputs if isinstance(outputs, tuple) else (outputs, None)
    if isinstance(labels, Mapping):
        following = labels["shift_labels"]
    else:
        logits, following = logits[:, :-1], labels[:, 1:]
    loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), following.flatten(), ignore_index=_IGNORED)
    if balance is None:
        return loss
    return loss + balance, {"lm_loss": loss.detach(), "router_loss": balance.detach()}


def next_token_loss_of_parts(logits: torch.Tensor, labels: Any, *, own_share: bool) -> torch.Tensor:
    """As :func:`next_token_loss`, where ranks have parts of sequences: the mean over the tokens of all of them.

    Args:
        logits: ``(batch, this rank's tokens, vocabulary)``.
        labels: ``{"shift_labels": ...}``: the last token's next one is on the next rank.
        own_share: See ``mean_loss``.

    Raises:
        DeepSpeedConfigError: The labels are not so.
    """
    from deepspeed.parallel.sequence.loss import mean_loss

    if not isinstance(labels, Mapping) or "shift_labels" not in labels:
        raise DeepSpeedConfigError(
            "from_transformers with sequence_parallel_size: the loss got labels that it would have to shift, and the "
            "label of this rank's last token is on the next rank; give {\"shift_labels\": each token's next one} for "
            "labels (UlyssesSPDataLoaderAdapter makes them)"
        )
    following = labels["shift_labels"]
    each = nn.functional.cross_entropy(
        logits.float().flatten(0, 1), following.flatten(), ignore_index=_IGNORED, reduction="none"
    )
    return mean_loss(each, following, own_share=own_share)


def whole_model_of(layers: list[Any]) -> Any:
    """The model of which :func:`layers_of` made layers, with values or without; None for other layers."""
    for spec in layers:
        part = spec.module_args[0] if isinstance(spec, LayerSpec) and spec.module_args else None
        if isinstance(part, _Part):
            return part.skeleton
    return None


def usual_sample(model_or_config: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels of one sequence, of which only the shapes count."""
    longest = longest_sequence_of(getattr(model_or_config, "config", model_or_config))
    tokens = torch.zeros(1, min(longest or 512, 1024), dtype=torch.int64)
    return tokens, tokens


def transformers_names(layers: list[Any]) -> dict[str, str]:
    """Beginnings of the names in a pipeline of these layers, to those in the Transformers model."""
    found: dict[str, str] = {}
    for number, spec in enumerate(layers):
        part = spec.module_args[0]
        own = f"tied_modules.{spec.key}" if isinstance(spec, TiedLayerSpec) else str(number)
        found.setdefault(f"{own}.part.", part.name)
    return found


def pipeline_names(model: nn.Module) -> dict[str, str]:
    """Returns beginnings of the names that a pipeline of ``model`` has, to the model's own; none if there is no such.

    Args:
        model: Any model. One of Transformers may be cut or changed: its configuration counts.
    """
    config = getattr(model, "config", None)
    if not hasattr(config, "model_type"):
        return {}
    try:
        return transformers_names(layers_of(config))
    except (DeepSpeedConfigError, NotYetSupportedError, ValueError):  # no decoder-only language model
        return {}


def transformers_state_dict(state: Mapping[str, Any], model_or_config: Any) -> dict[str, Any]:
    """A state dict of the pipeline under the Transformers model's names, for its ``load_state_dict``.

    Args:
        state: All parameters and buffers of the pipeline by name, as ``get_fp32_state_dict_from_zero_checkpoint`` and
            ``zero_to_fp32`` give them; the values are not copied.
        model_or_config: The model that the pipeline was made of, one like it, or its configuration.

    Raises:
        DeepSpeedConfigError: A name is not one of this pipeline's.
    """
    layers = layers_of(model_or_config)
    names = transformers_names(layers)
    found: dict[str, Any] = {}
    for own, value in state.items():
        beginning = next((one for one in names if own.startswith(one)), None)
        if beginning is None:
            raise DeepSpeedConfigError(
                f"transformers_state_dict: {own!r} is no name of a pipeline of this model, whose names begin with "
                f"{', '.join(list(names)[:4])}, ...; give the state dict of one that from_transformers made of it"
            )
        found[names[beginning] + own.removeprefix(beginning)] = value
    if isinstance(layers[-1], TiedLayerSpec):
        found[f"{layers[-1].forward_fn.name}.weight"] = found[f"{layers[0].module_args[0].name}weight"]  # type: ignore[union-attr]
    return found


def _skeleton(config: Any) -> Any:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


class _Part:
    """Where a layer's module lies in the model, and how to get it: as it is, or built by itself."""

    def __init__(self, skeleton: Any, model: Any, path: str) -> None:
        self.skeleton, self.model, self.path = skeleton, model, path
        self.name = f"{path}." if path else ""

    def get(self) -> Any:
        """The module."""
        if self.model is not None:
            return self.model.get_submodule(self.path)
        if torch.get_default_device().type == "meta":  # only shapes are asked for
            return copy.deepcopy(self.skeleton.get_submodule(self.path))
        module = copy.deepcopy(self.skeleton.get_submodule(self.path)).to_empty(device="cpu")
        for owner in module.modules():  # what is computed and not learned is made by the constructors
            if getattr(owner, "config", None) is not None and any(True for _ in owner.buffers(recurse=False)):
                made = type(owner)(owner.config)
                for name, value in made.named_buffers(recurse=False):
                    getattr(owner, name).copy_(value)
        for inner in module.modules():
            self.skeleton._init_weights(inner)
        return module

    def tp_plan(self) -> dict[str, str]:
        """What the model's plan for tensor parallelism says of this part, by names that begin with ``part``."""
        found = {}
        steps = self.path.split(".")
        for key, style in (getattr(self.skeleton, "_tp_plan", None) or {}).items():
            above, below = key.split(".")[: len(steps)], key.split(".")[len(steps) :]
            if len(above) == len(steps) and all(a in (step, "*") for a, step in zip(above, steps, strict=True)):
                found[".".join(("part", *below))] = style
        return found


class _Plan:
    """What is where in a model."""

    def __init__(self, skeleton: Any, model: Any) -> None:
        self._skeleton, self._model = skeleton, model
        self._anatomy = found = anatomy(skeleton)
        is_row = found.is_whole_base and len(found.block_lists) == 1 and len(found.norms) <= 1
        if not is_row or not (found.norms or found.after_norm) or found.head is None:
            raise NotYetSupportedError(
                f"from_transformers: {type(skeleton).__name__} is not a decoder-only model of one list of blocks, a "
                f"last norm and a head (found the lists {list(found.block_lists)}, the norms {list(found.norms)}, the "
                f"head {type(found.head).__name__}); write its layers as LayerSpecs"
            )
        self._tail = (*found.norms, *found.after_norm)

    def _part(self, *path: str) -> _Part:
        return _Part(self._skeleton, self._model, ".".join(path))

    def layers(self) -> list[Any]:
        """The row."""
        found, base, blocks = self._anatomy, self._anatomy.decoder_path, self._anatomy.block_lists[0]
        hears_routers = counts_routers(self._skeleton.config)
        embedding = self._part(found.embedding_path)
        row: list[Any] = [LayerSpec(_Embed, embedding)]
        elsewhere = (found.embedding_path.removeprefix(f"{base}."), *self._tail)
        row.append(LayerSpec(_Begin, self._part(base), blocks, elsewhere, hears_routers=hears_routers))
        routers = _recorded_routers(found.decoder) if hears_routers else None
        for i in range(len(found.blocks)):
            row.append(LayerSpec(_Block, self._part(base, blocks, str(i)), i, routers))
        row += [LayerSpec(_Norm, self._part(base, name)) for name in self._tail]
        shell = _shell(self._skeleton, base_prefix_of(self._skeleton), found.head_path)
        if found.is_tied:
            row[0] = TiedLayerSpec("embedding", _Embed, embedding, tied_weight_attr="part.weight")
            finish = _TiedHead(shell, found.head_path)
            head: LayerSpec = TiedLayerSpec(
                "embedding", _Embed, embedding, tied_weight_attr="part.weight", forward_fn=finish
            )
        else:
            head = LayerSpec(_Head, self._part(found.head_path), shell)
        return [*row, head]


Heard = dict[str, Any] | None
"""What the routers said so far, block after block, and which tokens count; None where the loss does not ask."""


def _recorded_routers(base: Any) -> list[tuple[type[nn.Module], int]]:
    """Classes of the routers that a model records, and which of their outputs; empty where it records none."""
    entries = (getattr(base, "_can_record_outputs", None) or {}).get("router_logits", [])
    found = []
    for entry in entries if isinstance(entries, list) else [entries]:
        target = getattr(entry, "target_class", entry)
        if isinstance(target, type):
            found.append((target, int(getattr(entry, "index", 1))))
    return found


def _shell(skeleton: Any, prefix: str, head: str) -> Any:
    """The causal model without its parts: its forward, around a decoder that is given what it returns."""
    shell = copy.copy(skeleton)
    shell._modules = {**skeleton._modules, prefix: _HandsOver(), head: nn.Identity()}
    return shell


class _HandsOver(nn.Module):
    """In the place of the decoder."""

    given: Any
    heard: Heard = None

    @property
    def decoder(self) -> _HandsOver:
        """Itself: some models call the decoder of what is in its place."""
        return self

    def forward(self, *_arguments: Any, **_named: Any) -> Any:
        from transformers.modeling_outputs import MoeModelOutputWithPast

        found = MoeModelOutputWithPast(last_hidden_state=self.given)
        if self.heard is not None:
            found.router_logits = tuple(self.heard["router_logits"])
        found.cross_attentions = None  # some models pass it on
        return found


class _HeadCall(nn.Module):
    """In the place of the head."""

    weight_and_bias: tuple[torch.Tensor, torch.Tensor | None]

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.__dict__["weight_and_bias"] = (weight, bias)  # they belong to the layer

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(hidden, *self.weight_and_bias)


def _finished(shell: Any, value: Any, weight: Any, bias: Any) -> Any:
    """The causal model's forward from the decoder's output on: logits, and the weighted balance loss if it has one."""
    hidden, heard = value if isinstance(value, tuple) else (value, None)
    running = copy.copy(shell)
    running._modules = dict(shell._modules)
    for name, module in running._modules.items():
        if isinstance(module, _HandsOver):
            running._modules[name] = handing = _HandsOver()
            handing.given, handing.heard = hidden, heard
        elif isinstance(module, nn.Identity):
            running._modules[name] = _HeadCall(weight, bias)
    if heard is None:
        return running(input_ids=None, use_cache=False).logits
    asked = {"attention_mask": heard["attention_mask"], "output_router_logits": True}
    found = running(input_ids=None, use_cache=False, **asked)
    balance = getattr(found, "aux_loss", None)
    if not isinstance(balance, torch.Tensor):
        return found.logits
    return found.logits, float(running.router_aux_loss_coef) * balance


class _TiedHead:
    """The head whose weight is the embedding's."""

    def __init__(self, shell: Any, name: str) -> None:
        self._shell = shell
        self.name = name

    def __call__(self, module: Any, value: Any) -> Any:
        return _finished(self._shell, value, module.part.weight, None)


class _Embed(nn.Module):
    """Tokens, or a dict or tuple that begins with them, to their vectors; the rest goes along."""

    part: Any

    def __init__(self, part: _Part) -> None:
        super().__init__()
        self.part = part.get()

    def forward(self, value: Any) -> dict[str, Any]:
        names = ("input_ids", "attention_mask", "position_ids")
        given = dict(value) if isinstance(value, dict) else None
        if given is None:
            given = dict(zip(names, value if isinstance(value, tuple) else (value,), strict=False))
        tokens = given.pop("input_ids")
        return {**given, "inputs_embeds": self.part(tokens)}


class _Result(torch.Tensor):
    """What stands for a block's result: models take it as it is, or as the first of a tuple."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __getitem__(self, index: Any) -> Any:
        plain = self.as_subclass(torch.Tensor)
        return plain.as_subclass(_Result) if isinstance(index, int) and index == 0 else plain[index]


class _Recorder(nn.Module):
    """In the place of a block: notes what it is called with."""

    calls: list[Any]

    def __init__(self, block: nn.Module, calls: list[Any]) -> None:
        super().__init__()
        plain = {name: value for name, value in vars(block).items() if not name.startswith("_")}
        self.__dict__.update({name: value for name, value in plain.items() if name not in self.__dict__})
        self.__dict__["calls"] = calls

    def forward(self, hidden: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
        self.calls.append((hidden, arguments, named))
        return hidden.as_subclass(_Result)


Travelling = tuple[torch.Tensor, list[Any], list[Any], Heard]
"""Between blocks: hidden states, what blocks are called with, which of it each takes, and what routers said."""


def _note(said: list[torch.Tensor], index: int, _module: Any, _arguments: Any, made: Any) -> None:
    said.append(made[index] if isinstance(made, tuple) else made)


class _Begin(nn.Module):
    """Everything that the decoder computes before its first block."""

    part: Any
    _calls: list[Any]

    def __init__(self, part: _Part, blocks: str, elsewhere: tuple[str, ...], *, hears_routers: bool = False) -> None:
        super().__init__()
        self._hears_routers = hears_routers
        whole: Any = copy.copy((part.model or part.skeleton).get_submodule(part.path))
        for name, held in vars(whole).items():  # hooks on the copy are none of the model's
            if isinstance(held, OrderedDict):
                vars(whole)[name] = held.copy()
        self.__dict__["_calls"] = []
        modules: dict[str, Any] = {}
        for name, child in whole._modules.items():
            if name == blocks:
                modules[name] = nn.ModuleList(_Recorder(block, self._calls) for block in child)
            elif name in elsewhere:
                modules[name] = nn.Identity()
            else:
                path = f"{part.path}.{name}"
                modules[name] = _Part(part.skeleton, part.model, path).get() if child is not None else None
        whole._modules = modules
        self.part = whole
        self._count = len(modules[blocks])

    def forward(self, value: dict[str, Any]) -> Travelling:
        self._calls.clear()
        self.part(**value, use_cache=False)
        calls = list(self._calls)
        self._calls.clear()
        if len(calls) != self._count:
            raise NotYetSupportedError(
                f"from_transformers: {type(self.part).__name__} calls {len(calls)} of its {self._count} blocks; a "
                "pipeline needs every block once in each forward, so switch off what skips or repeats them (layerdrop)"
            )
        values: list[Any] = []
        places: dict[int, int] = {}

        def place(item: Any) -> int:
            if id(item) not in places:
                places[id(item)] = len(values)
                values.append(item)
            return places[id(item)]

        told = [
            ([place(item) for item in arguments], {name: place(item) for name, item in named.items()})
            for _, arguments, named in calls
        ]
        heard: Heard = None
        if self._hears_routers:
            heard = {"attention_mask": value.get("attention_mask"), "router_logits": []}
        return calls[0][0], values, told, heard


class _Block(nn.Module):
    """One block, called as the model would call it."""

    part: Any
    _tp_plan: Mapping[str, str] = {}  # where tensor parallelism looks for what the model says of its cut

    def __init__(self, part: _Part, number: int, routers: list[tuple[type[nn.Module], int]] | None = None) -> None:
        super().__init__()
        self.part = part.get()
        self._tp_plan = part.tp_plan()
        self.number = number
        self._said: list[torch.Tensor] = []
        for module in self.part.modules():
            for target, index in routers or ():
                if isinstance(module, target):
                    module.register_forward_hook(functools.partial(_note, self._said, index))

    def forward(self, value: Travelling) -> Travelling:
        hidden, values, told, heard = value
        arguments, named = told[self.number]
        self._said.clear()
        made = self.part(hidden, *(values[i] for i in arguments), **{name: values[i] for name, i in named.items()})
        if heard is not None:
            heard = {**heard, "router_logits": [*heard["router_logits"], *self._said]}
        self._said.clear()
        return (made[0] if isinstance(made, tuple) else made), values, told, heard


class _Norm(nn.Module):
    """The last norm, or what follows it; what the blocks needed is left behind."""

    part: Any

    def __init__(self, part: _Part) -> None:
        super().__init__()
        self.part = part.get()

    def forward(self, value: Any) -> Any:
        hidden, *_, heard = value if isinstance(value, tuple) else (value, None)
        made: torch.Tensor = self.part(hidden)
        return made if heard is None else (made, heard)


class _Head(nn.Module):
    """A head with a weight of its own."""

    part: Any
    _shell: Any

    def __init__(self, part: _Part, shell: nn.Module) -> None:
        super().__init__()
        self.part = part.get()
        self.__dict__["_shell"] = shell

    def forward(self, value: Any) -> Any:
        return _finished(self._shell, value, self.part.weight, getattr(self.part, "bias", None))
