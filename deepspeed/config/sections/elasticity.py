"""``elasticity``: batch sizes that suit many numbers of ranks."""

from __future__ import annotations

from deepspeed.config.section import Section, key
from deepspeed.config.types import Bool, Float, Int, IntList


class Elasticity(Section):
    """Batch sizes that suit many numbers of ranks (removed upstream in 0.19.8)."""

    place = ("elasticity",)

    enabled: Bool = key(False, "Compute the batch sizes.", removed="0.19.8")
    max_train_batch_size: Int = key(2000, "Upper bound of the batch; required when enabled.", unit="samples", above=0)
    micro_batch_sizes: IntList = key(
        None, "Candidates; required when enabled.", factory=lambda: [2, 4, 6], unit="samples", above=0
    )
    min_gpus: Int = key(1, "Least number of ranks.", unit="ranks", above=0)
    max_gpus: Int = key(10_000, "Greatest number of ranks.", unit="ranks", above=0)
    min_time: Int = key(0, "Least time.", unit="minutes", minimum=0, no_effect="it never changed the batch sizes")
    version: Float = key(0.2, "Algorithm, 0.1 or 0.2.", minimum=0.1, maximum=0.2)
    prefer_larger_batch: Bool = key(True, "Break ties upwards.")
    ignore_non_elastic_batch_info: Bool = key(False, "Ignore batch keys elsewhere.")
    num_gpus_per_node: Int = key(1, "Ranks per node (version 0.2).", unit="ranks", above=0)
    model_parallel_size: Int = key(1, "Model-parallel size (version 0.2).", unit="ranks", above=0)
