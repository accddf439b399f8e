"""``engine.router``: records which experts tokens go to, and sends tokens to recorded ones.

A rollout computes with other kernels and dtypes than the trainer, so some tokens would choose other experts there. With
its routes the trainer uses the same experts (`Ma et al. 2025 <https://arxiv.org/abs/2510.11370>`_). The weights of the
chosen experts are computed, normalized and differentiated by the router as ever.

Routers of Transformers models choose by ``topk``; hooks on the module that has a router and its experts replace what it
chooses. A recomputation calls the same hooks, also in a thread of autograd.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from deepspeed.errors import CallOrderError, DeepSpeedConfigError
from deepspeed.models.inputs import tokens_in
from deepspeed.models.stacked_experts import experts_given, experts_per_token, skips_tokens
from deepspeed.parallel.expert.choice import ExpertChoice, TopK
from deepspeed.parallel.expert.layer import MOELayer
from deepspeed.parallel.expert.spread import is_stack, spread_of, stack_rows
from deepspeed.parallel.stages import is_pipeline
from deepspeed.torch_private import is_inside_backward
from deepspeed.uncompiled import without_compiling

_CALL = "engine.router.replay(routes)"


@dataclass(frozen=True)
class _RoutedLayer:
    """Describes one layer with experts."""

    name: str
    experts: nn.Module  # stacked experts, or a layer of ``deepspeed.moe``
    block: nn.Module  # the module that has the experts and their router
    num_experts: int
    num_choices: int  # more than experts where a router also chooses to give a token back
    k: int | None  # experts per token; None: known when the router runs


class RecordedRoutes:
    """Holds the routes of the forwards inside ``engine.router.record()``."""

    def __init__(self, names: Sequence[str]) -> None:
        self._chosen: dict[str, list[torch.Tensor]] = {name: [] for name in names}

    @property
    def routes(self) -> torch.Tensor:
        """The experts of each token: int64 ``[tokens of this rank, layers with experts, k]``.

        Tokens are in the order of the flattened batch, batch after batch; layers are in the order of the model. A
        recomputation is not recorded.

        Raises:
            CallOrderError: Not every layer has run equally often.
            DeepSpeedConfigError: Layers have different numbers of experts per token.
        """
        layers = {name: torch.cat(chosen) for name, chosen in self._chosen.items() if chosen}
        if len({len(layers.get(name, ())) for name in self._chosen}) != 1 or not layers:
            counts = {name: len(layers.get(name, ())) for name in self._chosen}
            raise CallOrderError(
                "engine.router.record: expected a forward inside the context that runs each layer with experts; "
                f"tokens by layer: {counts}. Run the whole model inside"
            )
        if len(sizes := {chosen.shape[1] for chosen in layers.values()}) != 1:
            raise DeepSpeedConfigError(
                f"engine.router.record: expected layers with one number of experts per token, found {sorted(sizes)}; "
                "routes of such a model have no common tensor. Give its layers the same k"
            )
        return torch.stack(list(layers.values()), dim=1)

    def add(self, name: str, chosen: torch.Tensor) -> None:
        """Adds the routes ``[S, k]`` of one layer, unless a backward recomputes them."""
        if not is_inside_backward():
            self._chosen[name].append(chosen.detach().long())


class _GivenRoutes:
    """Holds the routes of one ``replay``, checked against the model."""

    def __init__(self, routes: Any, positions: Any, layers: Sequence[_RoutedLayer]) -> None:
        self._routes = _integers(_CALL, routes)
        if self._routes.dim() != 3 or self._routes.shape[1] != len(layers):
            raise DeepSpeedConfigError(
                f"{_CALL}: expected [tokens, layers with experts, k] with {len(layers)} layers, found "
                f"{list(self._routes.shape)}; give one row of experts for each of {', '.join(x.name for x in layers)}"
            )
        self._tokens, self._k = self._routes.shape[0], self._routes.shape[2]
        for number, layer in enumerate(layers):
            if layer.k is not None:
                self._check_k(layer.name, layer.k)
            given = self._routes[:, number]
            if given.numel() and (int(given.min()) < 0 or int(given.max()) >= layer.num_choices):
                worst = given.min() if given.min() < 0 else given.max()
                raise DeepSpeedConfigError(
                    f"{_CALL}: expected experts 0 to {layer.num_choices - 1} in the layer {layer.name!r}, found "
                    f"{int(worst)}. Leave tokens without routes out by positions="
                )
        self._positions: torch.Tensor | None = None
        self._last = -1
        if positions is not None:
            self._set_positions(_integers("engine.router.replay(positions=...)", positions))

    def _set_positions(self, positions: torch.Tensor) -> None:
        is_row = positions.shape == (self._tokens,)
        if not is_row or len(positions.unique()) != len(positions) or bool((positions < 0).any()):
            raise DeepSpeedConfigError(
                f"engine.router.replay(positions=...): expected [{self._tokens}], a token of the flattened batch for "
                f"each row of routes, each token once, found {list(positions.shape)}"
                f"{' with equal or negative ones' if is_row else ''}. Give one position per row"
            )
        self._positions = positions
        self._last = int(positions.max()) if len(positions) else -1

    def check_tokens(self, tokens: int) -> None:
        """Raises DeepSpeedConfigError unless the routes are of a flattened batch with ``tokens``."""
        if self._positions is None and tokens != self._tokens:
            raise DeepSpeedConfigError(
                f"{_CALL}: expected routes of {tokens} tokens, as this rank's batch has, found {self._tokens}; give "
                "positions= for routes of some tokens only"
            )
        if self._last >= tokens:
            raise DeepSpeedConfigError(
                f"engine.router.replay(positions=...): expected tokens 0 to {tokens - 1} of this rank's batch, found "
                f"{self._last}. Count tokens of the flattened batch"
            )

    def _check_k(self, name: str, k: int) -> None:
        if k != self._k:
            raise DeepSpeedConfigError(
                f"{_CALL}: expected {k} experts per token, as the router of {name!r} chooses, found {self._k}; give "
                f"routes [tokens, layers, {k}]"
            )

    def fits(self, own: torch.Tensor) -> bool:
        """Returns whether ``own`` ``[S, k]`` has as many experts per token as the routes."""
        return own.shape[1] == self._k

    def in_place_of(self, own: torch.Tensor, number: int, name: str) -> torch.Tensor:
        """Returns the routes of layer ``number``; tokens without have those that the router chose, ``own`` ``[S, k]``.

        Raises:
            DeepSpeedConfigError: The numbers of tokens or of experts per token differ.
        """
        self.check_tokens(len(own))
        self._check_k(name, own.shape[1])
        self._routes = self._routes.to(own.device)
        given = self._routes[:, number].to(own.dtype)
        return given if self._positions is None else own.index_copy(0, self._positions.to(own.device), given)


class RouterReplay:
    """Records and replays the routes of one model; ``engine.router``."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._given: _GivenRoutes | None = None
        self._records: list[RecordedRoutes] = []
        self._open: list[_BlockChoice] = []
        self._hooks = ExitStack()
        self._users = 0

    @contextmanager
    def record(self) -> Iterator[RecordedRoutes]:
        """Records the routes of every forward inside, in training and evaluation; each rank those of its tokens.

        Inside :meth:`replay` they are the replayed ones. Compiled models run in eager mode inside.

        Returns:
            The record, whose ``routes`` are int64 ``[tokens, layers with experts, k]``.

        Raises:
            DeepSpeedConfigError: The model has no layers with experts, or is a pipeline.
        """
        layers = self._layers("record")
        record = RecordedRoutes([layer.name for layer in layers])
        with self._hooked(layers):
            self._records.append(record)
            try:
                yield record
            finally:
                self._records.remove(record)

    @contextmanager
    def replay(self, routes: Any, positions: Any = None) -> Iterator[None]:
        """Sends tokens to given experts; forward, recomputation and backward of one batch run inside.

        The router computes the weights of these experts, normalizes and differentiates them as those of its own choice.
        Each rank gives the routes of its own tokens. Compiled models run in eager mode inside.

        Args:
            routes: Integers ``[tokens of this rank, layers with experts, k]``, in the order of the flattened batch, as
                of :meth:`record`.
            positions: Integers ``[n]``: row i of ``routes`` ``[n, layers, k]`` belongs to that token of the flattened
                batch, and tokens that are not named route themselves. None: all tokens in order.

        Raises:
            DeepSpeedConfigError: Routes or positions do not fit the model; in the forward: they do not fit the batch,
                or a router does not choose by ``torch.topk``.
            CallOrderError: Inside another ``replay``.
        """
        if self._given is not None:
            raise CallOrderError("engine.router.replay: another replay is active; leave its context before")
        layers = self._layers("replay")
        given = _GivenRoutes(routes, positions, layers)
        with self._hooked(layers):
            self._given = given
            try:
                yield
            finally:
                self._given = None

    def _layers(self, call: str) -> list[_RoutedLayer]:
        if is_pipeline(self._model):
            raise DeepSpeedConfigError(
                f"engine.router.{call}: expected a model whose layers are all on this rank, found a PipelineModule, "
                "whose micro-batches run in one call. Train it without pipeline stages"
            )
        if layers := list(_layers_of(self._model)):
            return layers
        raise DeepSpeedConfigError(
            f"engine.router.{call}: expected layers with experts (deepspeed.moe.layer.MoE, or stacked experts of "
            f"Transformers 5); {type(self._model).__name__} has none"
        )

    @contextmanager
    def _hooked(self, layers: Sequence[_RoutedLayer]) -> Iterator[None]:
        self._users += 1
        if self._users == 1:
            self._add_hooks(layers)
        try:
            with without_compiling():
                yield
        finally:
            self._users -= 1
            if self._users == 0:
                self._hooks.close()

    def _add_hooks(self, layers: Sequence[_RoutedLayer]) -> None:
        own = self._model.register_forward_pre_hook(self._check_inputs, with_kwargs=True)
        self._hooks.callback(own.remove)
        for number, layer in enumerate(layers):
            if isinstance(layer.experts, MOELayer):
                gate = layer.experts.gate
                gate.choose = partial(self._choose, number, layer.name)
                self._hooks.callback(setattr, gate, "choose", None)
                continue
            handles = (
                layer.block.register_forward_pre_hook(partial(self._enter, number, layer)),
                layer.block.register_forward_hook(self._leave, prepend=True, always_call=True),
                layer.experts.register_forward_pre_hook(self._check_choice, with_kwargs=True),
            )
            for handle in handles:
                self._hooks.callback(handle.remove)

    def _check_inputs(self, model: nn.Module, inputs: Any, named: Any) -> None:
        if self._given is not None and (tokens := tokens_in(model, inputs, named)) is not None:
            self._given.check_tokens(tokens)

    def _choose(self, number: int, name: str, own: torch.Tensor) -> torch.Tensor:
        used = own if self._given is None else self._given.in_place_of(own, number, name)
        self._add(name, used)
        return used

    def _add(self, name: str, used: torch.Tensor) -> None:
        for record in self._records:
            record.add(name, used)

    def _enter(self, number: int, layer: _RoutedLayer, block: nn.Module, inputs: Any) -> None:
        choice = _BlockChoice(number, layer, self._given)
        choice.__enter__()
        self._open.append(choice)

    def _leave(self, block: nn.Module, inputs: Any, result: Any) -> None:
        if self._open and self._open[-1].layer.block is block:  # not if a hook before ours has failed
            self._open.pop().__exit__(None, None, None)

    def _check_choice(self, experts: nn.Module, inputs: Any, named: Any) -> None:
        choice = self._open[-1]
        self._add(choice.layer.name, choice.checked(experts_given(experts, inputs, named)))


class _BlockChoice(ExpertChoice):
    """Sees what the router of one block chooses, and replaces it where routes are given."""

    def __init__(self, number: int, layer: _RoutedLayer, given: _GivenRoutes | None) -> None:
        super().__init__()
        self.layer = layer
        self._number, self._given = number, given
        self._chosen: torch.Tensor | None = None  # ``[S, k]`` of the last choice

    @override
    def choose(self, scores: torch.Tensor, topk: TopK) -> torch.Tensor | None:
        if scores.size(-1) < self.layer.num_experts:  # groups of experts
            return None
        own = topk(scores).indices
        flat = own.reshape(-1, own.size(-1))
        if self._given is None:
            self._chosen = flat
            return None
        if not self._given.fits(flat):  # the best of a group, where one group has all experts
            return None
        self._chosen = self._given.in_place_of(flat, self._number, self.layer.name)
        return self._chosen.view(own.shape)

    def checked(self, experts: torch.Tensor | None) -> torch.Tensor:
        """Returns the routes ``[S, k]`` that are used; ``experts`` ``[S, k]``: what the experts get, if they get it.

        Raises:
            DeepSpeedConfigError: The router did not use the given routes.
        """
        chosen = self._chosen
        if chosen is not None and (self._given is not None or experts is None or experts.shape == chosen.shape):
            return chosen
        if experts is not None and (
            self._given is None or torch.equal(self._given.in_place_of(experts, self._number, self.layer.name), experts)
        ):
            return experts
        raise DeepSpeedConfigError(
            f"engine.router: expected the router of {self.layer.name!r} ({type(self.layer.block).__name__}) to choose "
            f"among {self.layer.num_experts} experts by torch.topk; it did not call it. Leave replay out for this model"
        )


def _layers_of(model: nn.Module) -> Iterator[_RoutedLayer]:
    for name, module in model.named_modules():
        if isinstance(module, MOELayer):
            count = module.ep_size * module.num_local_experts
            yield _RoutedLayer(name, module, module, count, count, module.gate.k)
        elif is_stack(module):
            state = spread_of(module)
            rows = stack_rows(module) if state is None else state.rows
            block = model.get_submodule(name.rpartition(".")[0])
            choices = max(rows.values()) + skips_tokens(block)
            yield _RoutedLayer(name, module, block, rows["down_proj"], choices, experts_per_token(block))


def _integers(call: str, values: Any) -> torch.Tensor:
    found = torch.as_tensor(values)
    if found.is_floating_point() or found.is_complex() or found.dtype == torch.bool:
        raise DeepSpeedConfigError(f"{call}: expected integers, found {found.dtype}; convert them by .long()")
    return found.detach().long()
