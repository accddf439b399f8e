"""Progressive layer drop and random-LTD as a feature of the engine: draws layers and tokens for each forward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from typing_extensions import override

from deepspeed.config.sections.data_efficiency import RandomLtd
from deepspeed.config.sections.root import Root
from deepspeed.dropping.layers import LayerDrop, ProgressiveLayerDrop, droppable_blocks
from deepspeed.dropping.tokens import RandomLayerTokenDrop, RandomLTDScheduler, TokenDrop, attach
from deepspeed.engine_feature import (
    SEQUENCE_RANKS,
    STAGES,
    Conflict,
    EngineFeature,
    EngineHooks,
    EngineSetup,
    takes_keyword,
)
from deepspeed.errors import CallOrderError, DeepSpeedConfigError
from deepspeed.zero.bucket import Bucket
from deepspeed.zero.runtime import ZeroRuntime

_IN_A_STAGE = "a stage has some of the layers, and several micro-batches are in flight at once"
_WITHOUT_STAGES = "drop layers or tokens in the forward of the pipeline's own layers, or train without a pipeline"


def _drops_layers(root: Root) -> bool:
    return root.progressive_layer_drop is not None and root.progressive_layer_drop.enabled


def _random_ltd_of(root: Root) -> RandomLtd | None:
    section = root.data_efficiency
    if section is None or not (section.enabled and section.data_routing.enabled):
        return None
    return section.data_routing.random_ltd if section.data_routing.random_ltd.enabled else None


class ParameterBlockMap:
    """Maps the parameters of each bucket to those of ``blocks``, which a forward may skip, that they belong to."""

    def __init__(self, model: nn.Module, buckets: Iterable[Bucket], blocks: Sequence[nn.Module]) -> None:
        block_of = {module: number for number, block in enumerate(blocks) for module in block.modules()}
        owners: dict[nn.Parameter, set[int | None]] = {}
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                owners.setdefault(parameter, set()).add(block_of.get(module))
        self._owners = {
            bucket.index: frozenset[int | None]().union(*(owners.get(parameter, {None}) for parameter in bucket.params))
            for bucket in buckets
        }

    def only_of(self, numbers: Iterable[int]) -> frozenset[int]:
        """Returns the indices of the buckets whose parameters all belong to these blocks."""
        left_out = frozenset[int | None](numbers)
        return frozenset(index for index, owners in self._owners.items() if owners and owners <= left_out)


class LayerDropHooks:
    """Draws the layers that forwards of one engine skip, by the keep ratio ``theta`` of the step."""

    def __init__(self, model: nn.Module, runtime: ZeroRuntime, theta: ProgressiveLayerDrop) -> None:
        self.theta = theta
        self._schedule = runtime.schedule
        self._draws: list[tuple[LayerDrop, ParameterBlockMap]] = [
            (drop, ParameterBlockMap(model, runtime.buckets, blocks)) for drop, blocks in droppable_blocks(model)
        ]
        self._last: tuple[int, int] | None = None  # steps and micro-steps at the last training forward
        self._forwards = 0  # training forwards since then, without the first

    def at(self, global_steps: int) -> None:
        """Sets the keep ratio for ``global_steps`` updates."""
        self.theta.update_state(max(global_steps - 1, 0))

    def keep_all(self) -> None:
        """Keeps every block."""
        for drop, _ in self._draws:
            drop.keep_all()

    def draw(self, global_steps: int, micro_steps: int) -> dict[str, Any]:
        """Draws the blocks that a training forward skips; returns keyword arguments where its own code skips."""
        self.at(global_steps)
        self._forwards = self._forwards + 1 if self._last == (global_steps, micro_steps) else 0
        self._last = (global_steps, micro_steps)
        if not self._draws:
            return self.theta.get_state()
        unused: frozenset[int] = frozenset()
        for number, (drop, owners) in enumerate(self._draws):
            unused |= owners.only_of(drop.draw(self.theta.get_theta(), micro_steps, self._forwards, number))
        self._schedule.skip(unused)
        return {}


class TokenDropHooks:
    """Sets the number of tokens that the converted layers of one engine keep; an update has ``batch_size`` samples."""

    def __init__(self, model: nn.Module, section: RandomLtd, batch_size: int) -> None:
        self._model = model
        self._section = section
        self._tokens: TokenDrop | None = None  # None until layers have been converted
        self.schedule = RandomLTDScheduler({**section.model_dump(), "global_batch_size": batch_size})
        if any(isinstance(layer, RandomLayerTokenDrop) for layer in model.modules()):
            self.attach()

    def attach(self) -> None:
        """Enables dropping in the layers of ``random_ltd_layer_id``; ValueError where a number names no one layer."""
        is_first = self._section.hidden_state_order == "seq_batch_dim"
        self._tokens = TokenDrop(mask_name=self._section.model_mask_name, sequence_first=is_first)
        attach(self._model, self._section.random_ltd_layer_id or [], self._tokens)

    def keep(self, global_steps: int) -> None:
        """Sets how many tokens a training forward keeps; raises CallOrderError where no layer was converted."""
        if self._tokens is None:
            raise CallOrderError(
                "random_ltd is enabled, but no layer drops tokens: call "
                "deepspeed.dropping.convert_to_random_ltd(engine, LayerClass) after initialize, or on the model before"
            )
        self.schedule.update_seq(global_steps)
        self._tokens.kept = self.schedule.get_current_seq()


class DroppingHooks(EngineHooks):
    """Drops blocks or tokens in one engine's forwards."""

    def __init__(self, layers: LayerDropHooks | None, tokens: TokenDropHooks | None) -> None:
        self.layers = layers  # draws the skipped layers; None if progressive layer drop is disabled
        self.tokens = tokens  # sets the number of kept tokens; None if random-LTD is disabled
        exposed: dict[str, Any] = {}
        if layers is not None:
            exposed["progressive_layer_drop"] = layers.theta
        if tokens is not None:
            exposed |= {"random_ltd_scheduler": tokens.schedule, "random_ltd_initialize": tokens.attach}
            self.states = {"random_ltd": tokens.schedule}
        self.exposed = exposed
        self.resume(0, 0)

    @override
    def resume(self, global_steps: int, skipped_steps: int) -> None:
        if self.layers is not None:
            self.layers.at(global_steps)

    @override
    def after_update(self, global_steps: int, *, was_skipped: bool) -> None:
        self.resume(global_steps, 0)

    @override
    def before_forward(self, *, is_training: bool, global_steps: int, micro_steps: int) -> dict[str, Any]:
        if not is_training:
            if self.layers is not None:
                self.layers.keep_all()
            return {}
        if self.tokens is not None:
            self.tokens.keep(global_steps)
        return {} if self.layers is None else self.layers.draw(global_steps, micro_steps)


class DroppingFeature(EngineFeature):
    """Skips random layers and drops random tokens in training forwards."""

    title = "dropped layers and tokens"
    setting = "progressive_layer_drop, data_efficiency.data_routing.random_ltd"
    conflicts = (
        Conflict("progressive_layer_drop", lambda s: _drops_layers(s.root), STAGES, _IN_A_STAGE, _WITHOUT_STAGES),
        Conflict(
            "data_efficiency.data_routing.random_ltd",
            lambda setup: _random_ltd_of(setup.root) is not None,
            STAGES,
            _IN_A_STAGE,
            _WITHOUT_STAGES,
        ),
        Conflict(
            "data_efficiency.data_routing.random_ltd",
            lambda setup: _random_ltd_of(setup.root) is not None,
            SEQUENCE_RANKS,
            "its schedule counts the tokens of whole sequences, and each rank has only a part of each",
            "disable it, or set sequence_parallel_size to 1",
        ),
    )

    @override
    def refuse(self, setup: EngineSetup) -> None:
        model = setup.model
        if not _drops_layers(setup.root) or droppable_blocks(model):
            return
        if missing := [name for name in ProgressiveLayerDrop().get_state() if not takes_keyword(model, name)]:
            raise DeepSpeedConfigError(
                f"progressive_layer_drop: each training forward of {type(model).__name__} gets the keywords "
                f"progressive_layer_drop and pld_theta, and it does not take {' and '.join(missing)}; call "
                "deepspeed.progressive_layer_drop(model, blocks=...) before initialize, which drops blocks of any "
                "model, or add the keywords and drop layers in the forward"
            )

    @override
    def hooks(self, setup: EngineSetup, runtime: ZeroRuntime, groups: Any, batch_size: int) -> EngineHooks | None:
        root, layers, tokens = setup.root, None, None
        if _drops_layers(root):
            section = root.progressive_layer_drop
            assert section is not None
            theta = ProgressiveLayerDrop(section.theta, section.gamma)
            layers = LayerDropHooks(setup.model, runtime, theta)
        if (random_ltd := _random_ltd_of(root)) is not None:
            tokens = TokenDropHooks(setup.model, random_ltd, batch_size)
        return None if layers is None and tokens is None else DroppingHooks(layers, tokens)


FEATURE = DroppingFeature()
