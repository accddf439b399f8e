"""``zero_optimization.offload_param`` and ``zero_optimization.offload_optimizer``."""

from __future__ import annotations

from typing import Annotated, Literal

from deepspeed.config.section import Section, key
from deepspeed.config.types import AnyCase, Bool, FilePath, Float, Int

Device = Annotated[Literal["none", "cpu", "nvme"], AnyCase]


class OffloadParam(Section):
    """Controls where the shards of the compute parameters are kept between uses (stage 3).

    Below stage 3, where each rank has whole parameters, the section is accepted without effect.
    """

    device: Device = key("none", "Where the parameter shards are kept. nvme needs nvme_path.")
    nvme_path: FilePath = key(None, "Folder for the files of device nvme.", null_means="none given", per_rank=True)
    buffer_count: Int = key(5, "Staging buffers (device nvme).", unit="buffers", minimum=0)
    buffer_size: Int = key(
        100_000_000, "Size of a staging buffer (device nvme); the largest shard must fit.", unit="elements", minimum=0
    )
    max_in_cpu: Int = key(
        1_000_000_000, "Elements that may stay in host memory (device nvme).", unit="elements", minimum=0
    )
    pin_memory: Bool = key(True, "Page-locked host memory, for faster copies to the device.", per_rank=True)
    page_cache: Bool | None = key(
        None,
        "true: files are read through the system's page cache, at the speed of memory if they fit into it. false: "
        "direct access (device nvme).",
        null_means="true without an optimizer, if the files of this host fit into free memory and an eighth of all "
        "memory stays free",
    )


class OffloadOptimizer(Section):
    """Controls where master weights and optimizer state are kept, and so where the update runs."""

    place = ("zero_optimization", "offload_optimizer")

    device: Device = key(
        "none",
        "Where master weights and optimizer state are kept. Needs stage 1 or more; nvme needs nvme_path. At stage "
        "0 it is accepted without effect, with one line in the log (programs build reference models from "
        "training configurations).",
    )
    nvme_path: FilePath = key(None, "Folder for the files of device nvme.", null_means="none given", per_rank=True)
    buffer_count: Int = key(
        4,
        "Staging buffers (device nvme). The update of one chunk needs a buffer for the master and one for each state "
        "(three buffers for Adam); pipeline_read and pipeline_write each need as many again. If the value is too "
        "small, it is raised.",
        unit="buffers",
        minimum=0,
    )
    pin_memory: Bool = key(True, "Page-locked host memory, for faster copies to the device.", per_rank=True)
    pipeline_read: Bool = key(False, "Read the next chunk while this one is updated (device nvme).")
    pipeline_write: Bool = key(False, "Write the last chunk while this one is updated (device nvme).")
    fast_init: Bool = key(
        False,
        "Do not write the initial zeros of states: file systems return zeros for unwritten space (device nvme).",
    )
    ratio: Float = key(
        1.0,
        "Share of parameters that are updated on the host, in whole buckets. Below 1 only with stage 3.",
        minimum=0,
        maximum=1,
        since="0.12.3",
    )
    update: Annotated[Literal["host", "device"], AnyCase] = key(
        "host",
        "Where masters in host memory are updated. host: on the host's cores. device: on the device, through which "
        "masters and states are streamed; for hosts with few cores. It needs device cpu and device memory for three "
        "chunks of at most 4,194,304 elements.",
    )
    super_offload: Bool = key(
        False,
        "Update each bucket in a thread during backward, as soon as its gradient is on the host. With clipping or "
        "an overflow the update is repeated or dropped. Same results. Stages 1 to 3, device cpu; needs the host "
        "memory of master weights and states twice.",
        since="0.18.0",
    )
    cpuadam_cores_perc: Float = key(
        0.8,
        "Share of the cores for the worker of super_offload.",
        minimum=0,
        maximum=1,
        since="0.18.0",
        no_effect="the update runs in the rank's own process, on its share of the cores or torch.set_num_threads()",
    )
    buffer_size: Int | None = key(
        None,
        "From early releases.",
        unit="elements",
        minimum=0,
        no_effect="buffers have the size of the largest chunk that passes through them",
    )


class Aio(Section):
    """Asynchronous file access for NVMe offload."""

    place = ("aio",)

    block_size: Int = key(1_048_576, "Size of one request, rounded up to pages.", unit="bytes", above=0)
    queue_depth: Int = key(8, "Requests in flight.", unit="requests", above=0)
    intra_op_parallelism: Int = key(
        1, "Requests in flight are this times queue_depth. Called thread_count before 0.16.4.", unit="threads", above=0
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
