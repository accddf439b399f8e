"""The table of the parallel axes, one row each: what the ranks along an axis divide, and what follows from that.

The ranks along ``data`` have different samples, those along ``tensor`` different parts of the same layers, those along
``pipe`` different layers. All code that depends on the axes reads :data:`ROWS`: the mesh, process groups, batch sizes,
the divisor of gradients, names of checkpoint files, features, plans and reports. A new axis needs a row here, a
configuration key for its size, and a feature in a subpackage of its own.

=============  ==================  ===================  =======================  ============================
``divides``    samples of a rank   parameters           factor of batch size     sum of gradients over ranks
=============  ==================  ===================  =======================  ============================
``"batch"``    its own             sharded by ZeRO      number of ranks          divided by number of ranks
``"sample"``   a part of each      sharded by ZeRO      1                        divided by number of ranks or
                                                                                 not: ``gradient_divisor``
``"model"``    the same            a part on each rank  1                        not computed
``"nothing"``  the same            sharded by ZeRO      1                        divided by number of ranks
=============  ==================  ===================  =======================  ============================
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class AxisRow:
    """Describes one axis."""

    name: str  # its name in a mesh, in traffic counters and in messages
    # what its ranks divide among themselves; see the table above
    divides: Literal["batch", "sample", "model", "nothing"]
    aliases: tuple[str, ...] = ()  # its other names in a torch ``DeviceMesh``, the usual short one first
    # The configuration key of its size. None for ``data``, which has the remaining ranks, and for ``pipe``, whose size
    # is the number of the model's stages.
    key: str | None = None
    counts: str = ""  # what its size counts, for messages and help texts
    # the keyword of ``deepspeed.plan`` and the option of ``ds_plan`` for its size; None: there is none
    option: str | None = None
    # the module of its feature, loaded if the axis has several ranks; None: it has no feature
    feature: str | None = None
    advice: str = ""  # how to reduce the cost of its collectives, for reports of a run


PIPE, DATA, EXPERT, SEQUENCE, TENSOR = "pipe", "data", "expert", "sequence", "tensor"

ROWS = (
    AxisRow(
        PIPE,
        "model",
        aliases=("pp", "pipeline", "pipeline_parallel"),
        counts="stages of the pipeline",
        option="pipe",
        feature="deepspeed.parallel.pipe.feature",
        advice="raise gradient_accumulation_steps, or take an interleaved schedule",
    ),
    AxisRow(
        DATA,
        "batch",
        aliases=("dp", "data_parallel", "dp_replicate", "dp_shard"),
        counts="data-parallel ranks",
        advice="raise train_micro_batch_size_per_gpu, or lower the ZeRO stage if memory allows; at stages 0 and 1 "
        "gradient_accumulation_steps helps too (above, each micro-batch is reduced by itself)",
    ),
    AxisRow(
        EXPERT,
        "batch",  # its ranks hold the same part of all layers but the experts
        aliases=("ep", "expert_parallel"),
        key="expert_parallel.autoep_size",
        counts="expert-parallel ranks",
        option="ep",
        feature="deepspeed.parallel.expert.feature",
        advice="keep the experts' ranks within one node, or balance the routes",
    ),
    AxisRow(
        SEQUENCE,
        "sample",
        aliases=("sp", "cp", "sequence_parallel"),
        key="sequence_parallel_size",
        counts="sequence-parallel ranks",
        option="sequence",
        feature="deepspeed.parallel.sequence.feature",
        advice="keep sequence_parallel_size within one node, or make it smaller",
    ),
    AxisRow(
        TENSOR,
        "model",
        aliases=("tp", "tensor_parallel"),
        key="tensor_parallel.autotp_size",
        counts="tensor-parallel ranks",
        option="tensor",
        feature="deepspeed.parallel.tensor.feature",
        advice="keep tensor_parallel.autotp_size within one node, or make it smaller",
    ),
)
"""All axes, outermost first: ranks along the last axis are consecutive, usually on one node."""


def _that_divide(*what: str) -> tuple[str, ...]:
    return tuple(row.name for row in ROWS if row.divides in what)


AXES = tuple(row.name for row in ROWS)
"""Names of all axes, outermost first."""
KEYS = {row.name: row.key for row in ROWS if row.key is not None}
"""The configuration key of the size of each axis, by name; axes without a key are left out."""
SAMPLES = _that_divide("batch")
"""Axes whose ranks train on different samples."""
PARTS_OF_SAMPLES = _that_divide("sample")
"""Axes whose ranks hold different parts of the same samples and replicate the dense parameters."""
SAME_SAMPLES = _that_divide("sample", "model", "nothing")
"""Axes whose ranks train on the same samples or parts of them. They do not multiply the batch size."""
SAME_PART = _that_divide("batch", "sample", "nothing")
"""Axes whose ranks replicate the dense parameters. ZeRO shards and experts are spread over these ranks."""
SAME_EXPERTS = tuple(name for name in SAME_PART if name != EXPERT)
"""Axes whose ranks replicate the same experts if experts have an axis of their own."""
OTHER_PARTS = _that_divide("model")
"""Axes whose ranks hold different parts of one model replica: the ``mp_rank`` in names of checkpoint files."""
PARTS_OF_LAYERS = tuple(name for name in OTHER_PARTS if name != PIPE)
"""Axes whose ranks hold different parts of the same layers. A parameter that all ranks hold whole counts once."""
