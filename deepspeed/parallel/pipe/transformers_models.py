"""Turns decoder-only Transformers models into sequences of layers, without changes to the model's code.

The model's own forward runs once per micro-batch with its blocks replaced by recorders, which record each block's
arguments (masks, positions, rotary tables) for any family. The blocks then run one by one on their stages with these
arguments, which are sent along. The last layer runs the causal model's own forward with a decoder that only returns
the blocks' result, so that a family's changes to its logits are applied.

The layers are: token embedding, everything before the blocks, the blocks, the last norm (and what follows it), the
head. A head that shares the embedding's weight is tied to it.

Where a mixture of experts counts its routers in the loss (``output_router_logits``), their outputs are sent along too,
and the model's own forward makes its balance loss of it at the head; its gradient goes back the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from deepspeed.errors import DeepSpeedConfigError, NotYetSupportedError
from deepspeed.models.anatomy import anatomy
from deepspeed.models.building import build_without_values
from deepspeed.models.configurations import counts_routers, longest_sequence_of
from deepspeed.models.head import IGNORED
from deepspeed.models.parts import ModelPart
from deepspeed.models.shell import Recording, RouterOutputs, Routers, Shell, record_routers, recorded_routers
from deepspeed.parallel.pipe.spec import LayerSpec, TiedLayerSpec
from deepspeed.parallel.tensor.vocabulary import VocabularyEmbedding
from deepspeed.uncompiled import uncompiled


def layers_of(model_or_config: Any) -> list[Any]:
    """Returns the row of layers of a causal language model, whose values are kept.

    Of a configuration a stage builds its layers only.

    Raises:
        DeepSpeedConfigError: It is neither a causal language model nor its configuration.
        NotYetSupportedError: The model is built otherwise than decoder-only models are.
    """
    if isinstance(model_or_config, nn.Module):
        plan = _Plan(model_or_config, model_or_config)
    elif hasattr(model_or_config, "model_type"):
        plan = _Plan(build_without_values(model_or_config), None)
    else:
        raise DeepSpeedConfigError(
            f"from_transformers: expected a causal language model of Transformers or its configuration, found "
            f"{type(model_or_config).__name__}"
        )
    return plan.layers()


TokenLosses = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Computes losses ``[tokens]`` from logits ``[tokens, vocabulary]`` and labels; 0 where a label is IGNORED."""


def next_token_loss(outputs: Any, labels: Any, *, losses: TokenLosses | None = None, token_mean: bool = False) -> Any:
    """Cross entropy of each token by those before it; labels of -100 do not count, as in Transformers.

    Args:
        outputs: Logits ``(batch, length, vocabulary)``; where routers count, those and the balance loss, 0-dim.
        labels: ``(batch, length)``, of the same tokens: they are shifted here. Or ``{"shift_labels": ...}``, of the
            same shape, with each token's next one.
        losses: Computes the loss of each token, for logits of which ranks have parts; None: torch's cross entropy.
        token_mean: Return the sum over tokens and their number, so that the update takes the mean over all its tokens.

    Returns:
        The loss, 0-dim; where routers count ``(loss, metrics)``, which are both parts of the loss. With ``token_mean``
        ``(sum, count)`` or ``(sum, count, metrics)``.
    """
    logits, balance = outputs if isinstance(outputs, tuple) else (outputs, None)
    if isinstance(labels, Mapping):
        following = labels["shift_labels"]
    else:
        logits, following = logits[:, :-1], labels[:, 1:]
    flat = following.flatten()
    if token_mean:
        total, count = _token_losses(logits, flat, losses).sum(), (flat != IGNORED).sum()
        if balance is None:
            return total, count
        mean = total.detach() / count.clamp(min=1)
        return total + balance * count, count, {"lm_loss": mean, "router_loss": balance.detach()}
    if losses is None:
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), flat, ignore_index=IGNORED)
    else:
        loss = losses(logits.flatten(0, 1), flat).sum() / (flat != IGNORED).sum()
    if balance is None:
        return loss
    return loss + balance, {"lm_loss": loss.detach(), "router_loss": balance.detach()}


def next_token_loss_of_parts(
    logits: torch.Tensor,
    labels: Any,
    *,
    own_share: bool,
    losses: TokenLosses | None = None,
    token_mean: bool = False,
) -> Any:
    """Cross entropy of the next token where each rank has a part of every sequence: the mean over all ranks' tokens.

    Args:
        logits: ``(batch, this rank's tokens, vocabulary)``.
        labels: ``{"shift_labels": (batch, this rank's tokens)}`` with each token's next one, as the one after the last
            token is on the next rank. Labels of -100 do not count.
        own_share: Back-propagate only this rank's share of the mean, see ``mean_loss``.
        token_mean: As ``losses`` see :func:`next_token_loss`; nothing is exchanged then.

    Returns:
        The loss, 0-dim, the same on all ranks that share sequences; with ``token_mean`` the sum over this rank's tokens
        and their number.

    Raises:
        DeepSpeedConfigError: ``labels`` has no ``shift_labels``.
    """
    from deepspeed.parallel.sequence.loss import mean_loss

    if not isinstance(labels, Mapping) or "shift_labels" not in labels:
        raise DeepSpeedConfigError(
            "from_transformers with sequence_parallel_size: the loss got labels that it would have to shift, and the "
            "label of this rank's last token is on the next rank; give {\"shift_labels\": each token's next one} for "
            "labels (UlyssesSPDataLoaderAdapter makes them)"
        )
    following = labels["shift_labels"]
    each = _token_losses(logits, following.flatten(), losses)
    if token_mean:
        return each.sum(), (following != IGNORED).sum()
    return mean_loss(each, following, own_share=own_share)


def _token_losses(logits: torch.Tensor, labels: torch.Tensor, losses: TokenLosses | None) -> torch.Tensor:
    """Returns the loss of each token, 1-D, of logits ``[batch, length, vocabulary]`` and labels ``[tokens]``."""
    if losses is not None:
        return losses(logits.flatten(0, 1), labels)
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), labels, ignore_index=IGNORED, reduction="none")


def whole_model_of(layers: list[Any]) -> Any:
    """Returns the model of which :func:`layers_of` made layers, with values or without; None for other layers."""
    for spec in layers:
        part = spec.module_args[0] if isinstance(spec, LayerSpec) and spec.module_args else None
        if isinstance(part, ModelPart):
            return part.skeleton
    return None


def usual_sample(model_or_config: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns inputs and labels of one sequence; only their shapes count."""
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
    """Maps name prefixes in a pipeline of ``model`` to the model's own; empty if it cannot be one.

    A Transformers model may be cut or changed: its configuration counts.
    """
    config = getattr(model, "config", None)
    if not hasattr(config, "model_type"):
        return {}
    try:
        return transformers_names(layers_of(config))
    except (DeepSpeedConfigError, NotYetSupportedError, ValueError):  # no decoder-only language model
        return {}


def names_in_other_form(model: Any) -> dict[str, str]:
    """Maps name prefixes of the other form of ``model`` (pipeline or Transformers model) to those of ``model``."""
    if getattr(model, "is_pipeline", False):
        return {whole: own for own, whole in model.names_in_transformers().items()}
    return pipeline_names(model)


def transformers_state_dict(state: Mapping[str, Any], model_or_config: Any) -> dict[str, Any]:
    """Returns a state dict of the pipeline under the Transformers model's names, for its ``load_state_dict``.

    ``state`` has all parameters and buffers of the pipeline by name, as ``get_fp32_state_dict_from_zero_checkpoint``
    and ``zero_to_fp32`` give them; the values are not copied. The model may be one like that of the pipeline.

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


class _Plan:
    """Lists where the parts of a model are."""

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
        # A weight that is in no layer would neither be trained nor saved.
        inside = tuple(
            f"{path}." if path else "" for path in (found.decoder_path, found.embedding_path, found.head_path)
        )
        outside = [name for name, _ in found.model.named_parameters() if not name.startswith(inside)]
        if outside:
            modules = sorted({name.partition(".")[0] for name in outside})
            raise NotYetSupportedError(
                f"from_transformers: {type(found.model).__name__} has {len(outside)} weights beside its decoder "
                f"({found.decoder_path}) and its head ({found.head_path}), in {', '.join(modules)} ({outside[0]}, "
                "...). A pipeline would leave them out, also when it is saved; write the model's layers as LayerSpecs, "
                "or give from_transformers the causal language model alone"
            )

    def _part(self, *path: str) -> ModelPart:
        return ModelPart(self._skeleton, self._model, ".".join(path))

    def layers(self) -> list[Any]:
        """Returns the row."""
        found, base, blocks = self._anatomy, self._anatomy.decoder_path, self._anatomy.block_lists[0]
        records_routers = counts_routers(self._skeleton.config)
        embedding = self._part(found.embedding_path)
        row: list[Any] = [LayerSpec(_Embed, embedding)]
        elsewhere = (found.embedding_path.removeprefix(f"{base}."), *self._tail)
        row.append(LayerSpec(_FirstLayers, self._part(base), blocks, elsewhere, records_routers=records_routers))
        routers = recorded_routers(found.decoder) if records_routers else None
        for i in range(len(found.blocks)):
            row.append(LayerSpec(_Block, self._part(base, blocks, str(i)), i, routers))
        row += [LayerSpec(_Norm, self._part(base, name)) for name in self._tail]
        shell = Shell(found)
        if found.is_tied:
            row[0] = TiedLayerSpec("embedding", _Embed, embedding, tied_weight_attr="part.weight")
            finish = _TiedHead(shell)
            head: LayerSpec = TiedLayerSpec(
                "embedding", _Embed, embedding, tied_weight_attr="part.weight", forward_fn=finish
            )
        else:
            head = LayerSpec(_Head, self._part(found.head_path), shell)
        return [*row, head]


class _TiedHead:
    """The head whose weight is the embedding's."""

    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        self.name = shell.head_path

    def __call__(self, module: Any, value: Any) -> Any:
        embedding = module.part
        if isinstance(embedding, VocabularyEmbedding):  # ranks share its weight
            return self._shell.finish(*_with_routers(value), embedding.project)
        return self._shell.finish(*_with_routers(value), lambda hidden: nn.functional.linear(hidden, embedding.weight))


def _with_routers(value: Any) -> tuple[torch.Tensor, RouterOutputs]:
    """Returns hidden states and routers' outputs, as the layer before returns them."""
    return value if isinstance(value, tuple) else (value, None)


class _Embed(nn.Module):
    """Tokens, or a dict or tuple that begins with them, to their vectors; the rest goes along."""

    part: Any
    _tp_plan: Mapping[str, str] = {}
    _tp_plan_is_part = True

    def __init__(self, part: ModelPart) -> None:
        super().__init__()
        self.part = part.get()
        self._tp_plan = part.tensor_plan("part")

    def forward(self, value: Any) -> dict[str, Any]:
        names = ("input_ids", "attention_mask", "position_ids")
        given = dict(value) if isinstance(value, dict) else None
        if given is None:
            given = dict(zip(names, value if isinstance(value, tuple) else (value,), strict=False))
        tokens = given.pop("input_ids")
        return {**given, "inputs_embeds": self.part(tokens)}


StageValue = tuple[torch.Tensor, list[Any], list[Any], RouterOutputs]
"""Sent between blocks: hidden states, the blocks' arguments, which of them each takes, and routers' outputs."""


class _FirstLayers(nn.Module):
    """Everything that the decoder computes before its first block."""

    part: Any
    _recording: Recording

    def __init__(
        self, part: ModelPart, blocks: str, elsewhere: tuple[str, ...], *, records_routers: bool = False
    ) -> None:
        super().__init__()
        self._records_routers = records_routers

        def child(name: str) -> nn.Module:
            return nn.Identity() if name in elsewhere else part.inside(name).get()

        self.__dict__["_recording"] = recording = Recording(part.original(), blocks, child)
        self.part = recording.decoder

    @uncompiled
    def forward(self, value: dict[str, Any]) -> StageValue:
        calls = self._recording.calls(**value)
        values: list[Any] = []
        places: dict[int, int] = {}

        def place(item: Any) -> int:
            if id(item) not in places:
                places[id(item)] = len(values)
                values.append(item)
            return places[id(item)]

        block_arguments = [
            ([place(item) for item in arguments], {name: place(item) for name, item in named.items()})
            for _, arguments, named in calls
        ]
        router_outputs: RouterOutputs = None
        if self._records_routers:
            router_outputs = {"attention_mask": value.get("attention_mask"), "router_logits": []}
        return calls[0][0], values, block_arguments, router_outputs


class _Block(nn.Module):
    """One block, called as the model would call it."""

    part: Any
    _tp_plan: Mapping[str, str] = {}  # where tensor parallelism looks for the model's own plan

    def __init__(self, part: ModelPart, number: int, routers: Routers | None = None) -> None:
        super().__init__()
        self.part = part.get()
        self._tp_plan = part.tensor_plan("part")
        self.number = number
        self._router_logits: list[torch.Tensor] = []
        record_routers(self.part, routers or [], self._router_logits)

    def forward(self, value: StageValue) -> StageValue:
        hidden, values, block_arguments, router_outputs = value
        arguments, named = block_arguments[self.number]
        self._router_logits.clear()
        made = self.part(hidden, *(values[i] for i in arguments), **{name: values[i] for name, i in named.items()})
        if router_outputs is not None:
            router_outputs = {
                **router_outputs,
                "router_logits": [*router_outputs["router_logits"], *self._router_logits],
            }
        self._router_logits.clear()
        return (made[0] if isinstance(made, tuple) else made), values, block_arguments, router_outputs


class _Norm(nn.Module):
    """The last norm, or what follows it; drops the blocks' arguments."""

    part: Any

    def __init__(self, part: ModelPart) -> None:
        super().__init__()
        self.part = part.get()

    def forward(self, value: Any) -> Any:
        hidden, *_, router_outputs = value if isinstance(value, tuple) else (value, None)
        made: torch.Tensor = self.part(hidden)
        return made if router_outputs is None else (made, router_outputs)


class _Head(nn.Module):
    """A head with a weight of its own."""

    part: Any
    _shell: Shell
    _tp_plan: Mapping[str, str] = {}
    _tp_plan_is_part = True

    def __init__(self, part: ModelPart, shell: Shell) -> None:
        super().__init__()
        self.part = part.get()
        self._tp_plan = part.tensor_plan("part")
        self.__dict__["_shell"] = shell

    def forward(self, value: Any) -> Any:
        return self._shell.finish(*_with_routers(value), self.part)
