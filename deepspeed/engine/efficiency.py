"""An engine's public attributes for curriculum learning, layer dropping and token dropping."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from deepspeed.config.sections.root import Root
from deepspeed.engine.features import FeatureHooks
from deepspeed.errors import CallOrderError

if TYPE_CHECKING:
    from deepspeed.data.curriculum.scheduler import CurriculumScheduler
    from deepspeed.dropping.layers import ProgressiveLayerDrop
    from deepspeed.dropping.tokens import RandomLTDScheduler


class EfficiencyAccess:
    """Mixin of the engine: attributes and methods of upstream for these schedules."""

    _root: Root
    _hooks: FeatureHooks
    training_dataloader: Any

    # -- curriculum --------------------------------------------------------------------------------------------------

    @property
    def curriculum_scheduler_legacy(self) -> CurriculumScheduler | None:
        """The schedule of the older ``curriculum_learning`` section; None without it.

        Between two steps it has the difficulty of the next forward.
        """
        return self._hooks.exposed.get("curriculum_scheduler_legacy")

    def curriculum_enabled_legacy(self) -> bool:
        """Returns ``curriculum_learning.enabled``."""
        return self.curriculum_scheduler_legacy is not None

    def curriculum_params_legacy(self) -> dict[str, Any] | None:
        """Returns the section ``curriculum_learning``, or None."""
        section = self._root.curriculum_learning
        return None if section is None else section.model_dump(exclude_none=True)

    def set_custom_curriculum_learning_schedule(self, schedule_func_dict: Mapping[str, Callable[[int], int]]) -> None:
        """Gives ``custom`` schedules their functions of the step. Every rank must pass the same.

        Args:
            schedule_func_dict: Function by metric; ``seqlen`` is that of the older section.

        Raises:
            CallOrderError: There is no curriculum that could use them.
        """
        sampler: Any = getattr(self.training_dataloader, "data_sampler", None)
        if hasattr(sampler, "set_custom_curriculum_learning_schedule"):
            sampler.set_custom_curriculum_learning_schedule(schedule_func_dict)
        elif (legacy := self.curriculum_scheduler_legacy) is not None and list(schedule_func_dict) == ["seqlen"]:
            legacy.set_custom_get_difficulty(schedule_func_dict["seqlen"])
        else:
            raise CallOrderError(
                "set_custom_curriculum_learning_schedule: this engine has no loader with a curriculum; enable "
                "data_efficiency.data_sampling.curriculum_learning and give initialize training_data"
            )

    def set_data_post_process_func(self, post_process_func: Callable[[Any, dict[str, Any]], Any]) -> None:
        """Lets a function change every batch of the training loader, for example by its difficulty.

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
        """The schedule of how many tokens are kept; None without the section."""
        return self._hooks.exposed.get("random_ltd_scheduler")

    def random_ltd_initialize(self) -> None:
        """Lets layers that were converted after ``initialize`` drop tokens; ``convert_to_random_ltd`` calls it.

        Raises:
            CallOrderError: The configuration does not switch token dropping on.
        """
        initialize = self._hooks.exposed.get("random_ltd_initialize")
        if initialize is None:
            raise CallOrderError(
                "random_ltd_initialize: enable data_efficiency, data_efficiency.data_routing and its random_ltd in the "
                "configuration"
            )
        initialize()

    @property
    def compression_scheduler(self) -> Any:
        """The schedule that switches on the techniques of ``compression_training``; None for a model without."""
        return self._hooks.exposed.get("compression_scheduler")

    # -- progressive layer dropping ----------------------------------------------------------------------------------

    @property
    def progressive_layer_drop(self) -> ProgressiveLayerDrop | None:
        """The keep ratio of layers; None without the section."""
        return self._hooks.exposed.get("progressive_layer_drop")

    def pld_enabled(self) -> bool:
        """Returns ``progressive_layer_drop.enabled``."""
        return self.progressive_layer_drop is not None

    def pld_params(self) -> dict[str, float] | None:
        """Returns ``theta`` and ``gamma`` of the section; None where it is off."""
        drop = self.progressive_layer_drop
        return None if drop is None else {"theta": drop.theta, "gamma": drop.gamma}

    def pld_theta(self) -> float:
        """Returns ``progressive_layer_drop.theta``: the ratio in the end."""
        return self._required_layer_drop("pld_theta").theta

    def pld_gamma(self) -> float:
        """Returns ``progressive_layer_drop.gamma``."""
        return self._required_layer_drop("pld_gamma").gamma

    def get_pld_theta(self) -> float | None:
        """Returns the ratio now; None where the section is off."""
        drop = self.progressive_layer_drop
        return None if drop is None else drop.get_theta()

    def _required_layer_drop(self, name: str) -> ProgressiveLayerDrop:
        drop = self.progressive_layer_drop
        if drop is None:
            raise CallOrderError(
                f"engine.{name}: progressive_layer_drop is not enabled in the configuration; enable it"
            )
        return drop
