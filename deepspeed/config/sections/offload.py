"""``zero_optimization.offload_param`` and ``zero_optimization.offload_optimizer``."""

from __future__ import annotations

from typing import Annotated, Literal

from deepspeed.config.section import Section, key
from deepspeed.config.types import AnyCase, Bool, FilePath, Float, Int

Device = Annotated[Literal["none", "cpu", "nvme"], AnyCase]


class OffloadParam(Section):
    """Where the shards of the compute parameters live between uses (stage 3)."""

    device: Device = key(
        "none", "Where the parameter shards are kept. cpu and nvme need stage 3; nvme needs nvme_path.", min_stage=0
    )
    nvme_path: FilePath = key(None, "Folder for the files of device nvme.", null_means="none given")
    buffer_count: Int = key(5, "Staging buffers (device nvme).", unit="buffers", above=0)
    buffer_size: Int = key(
        100_000_000, "Size of a staging buffer (device nvme); the largest shard must fit.", unit="elements", above=0
    )
    max_in_cpu: Int = key(
        1_000_000_000, "Elements that may stay in host memory (device nvme).", unit="elements", minimum=0
    )
    pin_memory: Bool = key(True, "Page-locked host memory, for faster copies to the device.")
    page_cache: Bool | None = key(
        None,
        "Files are used through the system's page cache, so that what fits into free memory comes at its speed; false: "
        "direct access (device nvme).",
        null_means="without an optimizer, when free memory is larger than the files of this host and an eighth of the "
        "machine's",
    )


class OffloadOptimizer(Section):
    """Where master weights and optimizer state live, and hence where the update runs."""

    place = ("zero_optimization", "offload_optimizer")

    device: Device = key(
        "none",
        "Where master weights and optimizer state are kept. Needs stage 1 or more; nvme needs nvme_path. At stage 0 "
        "(reference models are built from training configurations) it is accepted with one line.",
    )
    nvme_path: FilePath = key(None, "Folder for the files of device nvme.", null_means="none given")
    buffer_count: Int = key(
        4,
        "Staging buffers (device nvme). One chunk takes one for the master and one for each state, three for Adam; "
        "pipeline_read and pipeline_write take as many again each. Raised to what is needed.",
        unit="buffers",
        above=0,
    )
    pin_memory: Bool = key(True, "Page-locked host memory, for faster copies to the device.")
    pipeline_read: Bool = key(False, "Read the next chunk while this one is updated (device nvme).")
    pipeline_write: Bool = key(False, "Write the last chunk while this one is updated (device nvme).")
    fast_init: Bool = key(
        False,
        "Do not write the zeros that states start with; the file system reads them from space that was never written "
        "(device nvme).",
    )
    ratio: Float = key(
        1.0,
        "Share of parameters updated away from the device, in whole buckets; below 1 only with stage 3.",
        minimum=0,
        maximum=1,
        since="0.12.3",
    )
    super_offload: Bool = key(
        False,
        "Update each bucket in a thread beside backward, as soon as its gradient is there; where clipping or an "
        "overflow says so the update is made again. Same results. Stages 1 to 3, device cpu; takes as much host memory "
        "again.",
        since="0.18.0",
    )
    cpuadam_cores_perc: Float = key(
        0.8,
        "Share of the cores for the worker of super_offload.",
        minimum=0,
        maximum=1,
        since="0.18.0",
        no_effect="the update runs in the rank's own process, on as many threads as torch.get_num_threads() says",
    )
    buffer_size: Int | None = key(
        None,
        "From early releases.",
        unit="elements",
        minimum=0,
        no_effect="buffers are sized from the largest chunk that must pass through them",
    )


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
