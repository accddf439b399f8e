"""``elasticity``: batch sizes that many world sizes divide, and training that continues when ranks fail or join."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from typing_extensions import override

from deepspeed.config.section import Section, key
from deepspeed.config.types import Bool, Float, Int, IntList

_CONTINUE = "continue"
OWN_KEYS = frozenset({_CONTINUE, "copy_every", "patience", "heartbeat"})
"""Keys of runs that continue when ranks come and go; the others are about batch sizes."""


class Elasticity(Section):
    """Batch sizes that many numbers of ranks can share (removed upstream in 0.19.8), and runs whose ranks change."""

    place = ("elasticity",)
    _other_switches: ClassVar[tuple[str, ...]] = (_CONTINUE,)

    enabled: Bool = key(
        False,
        "Choose train_batch_size and train_micro_batch_size_per_gpu so that many numbers of ranks can share the batch; "
        "gradient_accumulation_steps follows.",
        removed="0.19.8",
    )
    max_train_batch_size: Int = key(2000, "Upper bound of the batch; required when enabled.", unit="samples", above=0)
    micro_batch_sizes: IntList = key(
        None,
        "Candidates for train_micro_batch_size_per_gpu; required when enabled. None exceeds max_train_batch_size.",
        factory=lambda: [2, 4, 6],
        unit="samples",
        above=0,
    )
    min_gpus: Int = key(1, "Smallest number of ranks that must be able to share the batch.", unit="ranks", above=0)
    max_gpus: Int = key(10_000, "Largest number of ranks.", unit="ranks", above=0)
    min_time: Int = key(0, "Minimum run time.", unit="minutes", minimum=0, no_effect="it never changed the batch sizes")
    version: Float = key(
        0.2,
        "Algorithm. 0.1: one batch for a list of numbers of ranks; other numbers are refused. 0.2: one batch for "
        "whole nodes; other numbers of ranks get the largest batch within the limit.",
        minimum=0.1,
        maximum=0.2,
    )
    prefer_larger_batch: Bool = key(
        True, "If several batches can be shared by equally many numbers of ranks, take the largest."
    )
    ignore_non_elastic_batch_info: Bool = key(
        False, "Allow batch keys at the top level; the chosen values replace them."
    )
    num_gpus_per_node: Int = key(
        1, "Ranks per node (version 0.2), a multiple of model_parallel_size.", unit="ranks", above=0
    )
    model_parallel_size: Int = key(
        1, "Ranks that see the same samples (version 0.2): tensor, sequence and pipeline ranks.", unit="ranks", above=0
    )
    __annotations__[_CONTINUE] = "Bool"  # a keyword of Python
    vars()[_CONTINUE] = key(
        False,
        "Go on when ranks are lost or join, in the same processes and with the same global batch "
        "(deepspeed.elasticity.ElasticSteps). Needs train_batch_size and train_micro_batch_size_per_gpu, and no "
        "gradient_accumulation_steps.",
    )
    copy_every: Int = key(
        1,
        "With continue, at stages 1 to 3: number of updates between two copies of each rank's model states to the "
        "host memory of another rank. After a loss at most this many updates are repeated.",
        unit="updates",
        above=0,
    )
    patience: Float = key(
        600.0, "With continue: maximum wait for the remaining ranks after a loss.", unit="seconds", above=0
    )
    heartbeat: Float = key(
        0.0,
        "With continue: a rank that sends no heartbeat for this long counts as lost, though its process has not "
        "ended (it was stopped, or is in a call that holds the interpreter lock). A process of the same host that "
        "was stopped by a signal is ended. 0: a rank is lost only when its process or host ends.",
        unit="seconds",
        minimum=0,
    )

    @property
    def continues(self) -> bool:
        """Whether the run continues when ranks come and go."""
        found: Any = getattr(self, _CONTINUE)
        return bool(found)

    @override
    def is_used(self) -> bool:
        return self.enabled or self.continues

    @override
    def _own_features(self) -> Iterator[str]:
        if self.continues:
            yield "deepspeed.elasticity.feature"
