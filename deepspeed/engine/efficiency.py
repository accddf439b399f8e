"""What training forwards get or leave out by the step: shorter sequences, fewer layers, fewer tokens."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from deepspeed.config.sections.data_efficiency import RandomLtd
from deepspeed.config.sections.root import Root
from deepspeed.engine.rooms import DROPPING, is_loaded, is_pipeline
from deepspeed.errors import CallOrderError, DeepSpeedConfigError
from deepspeed.logging import log_dist
from deepspeed.zero.gather.owners import Owners
from deepspeed.zero.runtime import ZeroRuntime

if TYPE_CHECKING:
    from deepspeed.data.curriculum.scheduler import CurriculumScheduler
    from deepspeed.dropping.layers import LayerDrop
    from deepspeed.dropping.theta import ProgressiveLayerDrop
    from deepspeed.dropping.token_schedule import RandomLTDScheduler
    from deepspeed.dropping.tokens import TokenDrop

SEQUENCE_LENGTH = "curriculum_seqlen"


def refuse_what_the_model_cannot(root: Root, model: nn.Module) -> None:
    """Whether the model's forward takes the keywords that it would get.

    Raises:
        DeepSpeedConfigError: It does not.
    """
    if is_pipeline(model):
        _refuse_in_a_pipeline(root)
        return
    if hands_over_lengths(root):
        if not _takes(model, SEQUENCE_LENGTH):
            raise DeepSpeedConfigError(
                f'curriculum_learning: with curriculum_type "seqlen" each training forward of {type(model).__name__} '
                f"gets the keyword {SEQUENCE_LENGTH}, which it does not take; add it, and let the forward cut its "
                f"inputs to [:, :{SEQUENCE_LENGTH}]; or leave curriculum_type out and cut the batch before the "
                "forward (deepspeed.data.curriculum.shortened) to "
                "engine.curriculum_scheduler_legacy.get_current_difficulty()"
            )
        if not _takes(model, SEQUENCE_LENGTH, by_name=True):
            log_dist(
                f"curriculum_learning: {type(model).__name__}.forward takes {SEQUENCE_LENGTH} among **kwargs, not by "
                "name; see to it that something cuts the inputs, or all training is at full length",
                level=logging.WARNING,
            )
    if _drops_layers(root) and not _rows_of(model):
        from deepspeed.dropping.theta import ProgressiveLayerDrop

        missing = [name for name in ProgressiveLayerDrop().get_state() if not _takes(model, name)]
        if missing:
            raise DeepSpeedConfigError(
                f"progressive_layer_drop: each training forward of {type(model).__name__} gets the keywords "
                f"progressive_layer_drop and pld_theta, and it does not take {' and '.join(missing)}; call "
                "deepspeed.progressive_layer_drop(model, blocks=...) before initialize, which drops blocks of any "
                "model, or add the keywords and drop layers in the forward"
            )


def _refuse_in_a_pipeline(root: Root) -> None:
    """A stage has some of the layers, and several micro-batches are on their way at once."""
    found = {
        "progressive_layer_drop": _drops_layers(root),
        "data_efficiency.data_routing.random_ltd": random_ltd_of(root),
    }
    for name, is_on in found.items():
        if is_on:
            raise DeepSpeedConfigError(
                f"{name}: cannot be combined with a PipelineModule; drop layers or tokens in the forward of the "
                "pipeline's own layers, or train without a pipeline"
            )


def hands_over_lengths(root: Root) -> bool:
    """Whether training forwards get the length to which they shall cut their inputs."""
    section = root.curriculum_learning
    return section is not None and section.enabled and section.curriculum_type == "seqlen"


def _drops_layers(root: Root) -> bool:
    return root.progressive_layer_drop is not None and root.progressive_layer_drop.enabled


def random_ltd_of(root: Root) -> RandomLtd | None:
    """The section of random-LTD, where it is on."""
    section = root.data_efficiency
    if section is None or not (section.enabled and section.data_routing.enabled):
        return None
    return section.data_routing.random_ltd if section.data_routing.random_ltd.enabled else None


def _rows_of(model: nn.Module) -> list[tuple[LayerDrop, list[nn.Module]]]:
    """The rows of blocks that ``progressive_layer_drop`` has made of layers of the model."""
    if not is_loaded(DROPPING):
        return []
    from deepspeed.dropping.layers import rows_of

    return rows_of(model)


def _takes(model: nn.Module, name: str, *, by_name: bool = False) -> bool:
    parameters = inspect.signature(model.forward).parameters
    any_name = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    return name in parameters or (any_name and not by_name)


class Efficiency:
    """Of one engine: the schedules, and what the next training forward gets from them.

    Args:
        root: The configuration.
        model: The model.
        runtime: Its sharded parameters.

    Attributes:
        curriculum: The older ``curriculum_learning`` section's, or None.
        layer_drop: The keep ratio of layers, or None.
        token_schedule: How many tokens the layers of random-LTD keep, or None.
    """

    def __init__(self, root: Root, model: nn.Module, runtime: ZeroRuntime, global_batch_size: int) -> None:
        self._schedule = runtime.schedule
        # A pipeline's function for batches (set_batch_fn) cuts them instead.
        self._hands_over_lengths = hands_over_lengths(root) and not is_pipeline(model)
        self.curriculum: CurriculumScheduler | None = None
        if root.curriculum_learning is not None and root.curriculum_learning.enabled:
            from deepspeed.data.curriculum.scheduler import CurriculumScheduler, settings_of

            self.curriculum = CurriculumScheduler(settings_of(root.curriculum_learning))
        self.layer_drop: ProgressiveLayerDrop | None = None
        self._rows: list[tuple[LayerDrop, Owners]] = []
        if _drops_layers(root):
            from deepspeed.dropping.theta import ProgressiveLayerDrop

            section = root.progressive_layer_drop
            assert section is not None
            self.layer_drop = ProgressiveLayerDrop(section.theta, section.gamma)
            self._rows = [(drop, Owners(model, runtime.buckets, blocks)) for drop, blocks in _rows_of(model)]
        self._model = model
        self._random_ltd = random_ltd_of(root)
        self._tokens: TokenDrop | None = None  # once layers have been converted
        self.token_schedule: RandomLTDScheduler | None = None
        if self._random_ltd is not None:
            from deepspeed.dropping.token_schedule import RandomLTDScheduler
            from deepspeed.dropping.tokens import RandomLayerTokenDrop

            settings = self._random_ltd.model_dump()
            self.token_schedule = RandomLTDScheduler({**settings, "global_batch_size": global_batch_size})
            if any(isinstance(layer, RandomLayerTokenDrop) for layer in model.modules()):
                self.attach_tokens()
        self._last: tuple[int, int] | None = None  # steps and micro-steps at the last training forward
        self._forwards = 0  # since then
        self.at(0)

    @property
    def is_idle(self) -> bool:
        """Whether nothing depends on the step."""
        return self.curriculum is None and self.layer_drop is None and self.token_schedule is None

    def attach_tokens(self) -> None:
        """Lets the converted layers that the configuration names drop tokens.

        Raises:
            CallOrderError: The configuration has no random-LTD.
            ValueError: The numbers do not fit the layers.
        """
        if self._random_ltd is None:
            raise CallOrderError(
                "random_ltd_initialize: enable data_efficiency, data_efficiency.data_routing and its random_ltd in the "
                "configuration"
            )
        from deepspeed.dropping.convert import attach
        from deepspeed.dropping.tokens import TokenDrop

        is_first = self._random_ltd.hidden_state_order == "seq_batch_dim"
        self._tokens = TokenDrop(mask_name=self._random_ltd.model_mask_name, sequence_first=is_first)
        attach(self._model, self._random_ltd.random_ltd_layer_id or [], self._tokens)

    def at(self, global_steps: int) -> None:
        """Goes to the schedules' values for the forwards of a step, after so many updates."""
        if self.curriculum is not None and self._is_defined(self.curriculum):
            self.curriculum.update_difficulty(global_steps + 1)
        if self.layer_drop is not None:
            self.layer_drop.update_state(max(global_steps - 1, 0))

    @staticmethod
    def _is_defined(curriculum: CurriculumScheduler) -> bool:
        """A custom schedule may get its function after ``initialize``; the first forward needs it."""
        return curriculum.get_state()["schedule_type"] != "custom" or curriculum.custom_get_difficulty is not None

    def before_forward(self, *, is_training: bool, global_steps: int, micro_steps: int) -> dict[str, Any]:
        """Draws for a forward, and returns its further keywords. Every rank must call it alike.

        Args:
            is_training: Of the model.
            global_steps: Updates so far.
            micro_steps: Micro-steps so far.
        """
        if self.is_idle:
            return {}
        if not is_training:
            for drop, _ in self._rows:
                drop.keep_all()
            return {}
        if self.curriculum is not None:
            self.curriculum.update_difficulty(global_steps + 1)
        if self.token_schedule is not None:
            self._keep_tokens(self.token_schedule, global_steps)
        self.at(global_steps)
        self._forwards = self._forwards + 1 if self._last == (global_steps, micro_steps) else 0
        self._last = (global_steps, micro_steps)
        keywords: dict[str, Any] = {}
        if self._hands_over_lengths:
            assert self.curriculum is not None
            keywords[SEQUENCE_LENGTH] = self.curriculum.get_current_difficulty()
        if self._rows:
            self._draw(micro_steps)
        elif self.layer_drop is not None:
            keywords.update(self.layer_drop.get_state())
        return keywords

    def _keep_tokens(self, schedule: RandomLTDScheduler, global_steps: int) -> None:
        if self._tokens is None:
            raise CallOrderError(
                "random_ltd is enabled, but no layer drops tokens: call "
                "deepspeed.dropping.convert_to_random_ltd(engine, LayerClass) after initialize, or on the model before"
            )
        schedule.update_seq(global_steps)
        self._tokens.kept = schedule.get_current_seq()

    def _draw(self, micro_steps: int) -> None:
        assert self.layer_drop is not None
        unused: frozenset[int] = frozenset()
        for number, (drop, owners) in enumerate(self._rows):
            dropped = drop.draw(self.layer_drop.get_theta(), micro_steps, self._forwards, number)
            unused |= owners.only_of(dropped)
        self._schedule.skip(unused)


class EfficiencyAccess:
    """Mixin of the engine: the published names of all this."""

    _root: Root
    _efficiency: Efficiency
    training_dataloader: Any

    # -- curriculum --------------------------------------------------------------------------------------------------

    @property
    def curriculum_scheduler_legacy(self) -> CurriculumScheduler | None:
        """The schedule of the older ``curriculum_learning`` section; None without it.

        Between two steps its difficulty is the next forward's.
        """
        return self._efficiency.curriculum

    def curriculum_enabled_legacy(self) -> bool:
        """``curriculum_learning.enabled``."""
        return self._efficiency.curriculum is not None

    def curriculum_params_legacy(self) -> dict[str, Any] | None:
        """The section ``curriculum_learning``, or None."""
        section = self._root.curriculum_learning
        return None if section is None else section.model_dump(exclude_none=True)

    def set_custom_curriculum_learning_schedule(self, schedule_func_dict: Mapping[str, Callable[[int], int]]) -> None:
        """Gives ``custom`` schedules their functions of the step; on every rank the same.

        Args:
            schedule_func_dict: Function by metric; ``seqlen`` is that of the older section.

        Raises:
            CallOrderError: There is no curriculum that could use them.
        """
        sampler: Any = getattr(self.training_dataloader, "data_sampler", None)
        if hasattr(sampler, "set_custom_curriculum_learning_schedule"):
            sampler.set_custom_curriculum_learning_schedule(schedule_func_dict)
        elif self._efficiency.curriculum is not None and list(schedule_func_dict) == ["seqlen"]:
            self._efficiency.curriculum.set_custom_get_difficulty(schedule_func_dict["seqlen"])
        else:
            raise CallOrderError(
                "set_custom_curriculum_learning_schedule: this engine has no loader with a curriculum; enable "
                "data_efficiency.data_sampling.curriculum_learning and give initialize training_data"
            )

    def set_data_post_process_func(self, post_process_func: Callable[[Any, dict[str, Any]], Any]) -> None:
        """Lets a function change every batch of the training loader, by the difficulty for example.

        Args:
            post_process_func: Called with the batch and the state of the sampler, in which ``current_difficulties`` has
                the difficulty by metric; what it returns is the batch.

        Raises:
            CallOrderError: The engine has no loader.
        """
        if self.training_dataloader is None:
            raise CallOrderError("set_data_post_process_func: give initialize training_data; there is no loader")
        self.training_dataloader.post_process_func = post_process_func

    # -- random layerwise token dropping -----------------------------------------------------------------------------

    @property
    def random_ltd_scheduler(self) -> RandomLTDScheduler | None:
        """How many tokens are kept; None without the section."""
        return self._efficiency.token_schedule

    def random_ltd_initialize(self) -> None:
        """Lets layers that were converted after ``initialize`` drop tokens; ``convert_to_random_ltd`` calls it."""
        self._efficiency.attach_tokens()

    # -- progressive layer dropping ----------------------------------------------------------------------------------

    @property
    def progressive_layer_drop(self) -> ProgressiveLayerDrop | None:
        """The keep ratio of layers; None without the section."""
        return self._efficiency.layer_drop

    def pld_enabled(self) -> bool:
        """``progressive_layer_drop.enabled``."""
        return self._efficiency.layer_drop is not None

    def pld_params(self) -> dict[str, float] | None:
        """``theta`` and ``gamma`` of the section; None where it is off."""
        drop = self._efficiency.layer_drop
        return None if drop is None else {"theta": drop.theta, "gamma": drop.gamma}

    def pld_theta(self) -> float:
        """``progressive_layer_drop.theta``: the ratio in the end."""
        return self._required_layer_drop("pld_theta").theta

    def pld_gamma(self) -> float:
        """``progressive_layer_drop.gamma``."""
        return self._required_layer_drop("pld_gamma").gamma

    def get_pld_theta(self) -> float | None:
        """The ratio now; None where the section is off."""
        drop = self._efficiency.layer_drop
        return None if drop is None else drop.get_theta()

    def _required_layer_drop(self, name: str) -> ProgressiveLayerDrop:
        if self._efficiency.layer_drop is None:
            raise CallOrderError(f"engine.{name}: progressive_layer_drop is not enabled in the configuration")
        return self._efficiency.layer_drop
