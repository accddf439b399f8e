"""``aio``: how files of offloaded states are read and written."""

from __future__ import annotations

from deepspeed.config.section import Section, key
from deepspeed.config.types import Bool, Int


class Aio(Section):
    """Asynchronous file access for NVMe offload."""

    place = ("aio",)

    block_size: Int = key(1_048_576, "Size of one request, rounded up to pages.", unit="bytes", above=0)
    queue_depth: Int = key(8, "Requests in flight.", unit="requests", above=0)
    intra_op_parallelism: Int = key(
        1, "Multiplies queue_depth; called thread_count before 0.16.4.", unit="threads", above=0
    )
    single_submit: Bool = key(
        False, "Submit requests one by one.", no_effect="every request is submitted as soon as a thread is free"
    )
    overlap_events: Bool = key(
        True, "Submit while waiting for earlier ones.", no_effect="requests are always submitted while others run"
    )
    use_gds: Bool = key(
        False, "Storage straight to device memory (CUDA).", no_effect="files always pass through host memory"
    )
