"""``zero_optimization``: what is sharded over the data-parallel ranks, and in what portions it is sent."""

from __future__ import annotations

import sys
from typing import Annotated, Literal

from deepspeed.config.section import Section, key
from deepspeed.config.sections.offload import OffloadOptimizer, OffloadParam
from deepspeed.config.types import AnyCase, Bool, BoolOrAuto, Float, Int, IntOrAuto, Stage, TextList

LEAF_CLASSES = (
    "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
    "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
)


class LeafModule(Section):
    """Modules gathered as a whole, because which of their children run depends on the data."""

    classes: TextList = key(
        None,
        "Class paths; a path that does not exist is ignored.",
        factory=lambda: list(LEAF_CLASSES),
        since="0.18.0",
    )
    names: TextList = key(None, "Module names, as named_modules() gives them.", factory=list, since="0.18.0")
    name_suffixes: TextList = key(None, "Ends of module names.", factory=list, since="0.18.0")


class LocoParam(Section):
    """Error feedback for quantized gradients (LoCo)."""

    err_beta: Float | None = key(
        None,
        "Decay of the running average of the quantization error; required in this section.",
        minimum=0,
        maximum=1,
        removed="0.19.8",
    )
    reset_T: Int | None = key(
        None,
        "Steps after which the errors of all parameters are reset; required in this section.",
        unit="steps",
        above=0,
        removed="0.19.8",
    )


class ZenFlow(Section):
    """ZenFlow: the important gradients are applied on the device at once, the rest on the host later."""

    topk_ratio: Float = key(0.1, "Share of gradients updated on the device.", minimum=0, maximum=1, since="0.17.5")
    select_strategy: Annotated[Literal["auto", "step", "epoch"], AnyCase] = key(
        "auto", "When the important gradients are selected again.", own_auto=True
    )
    select_interval: IntOrAuto = key(
        "auto", "Steps or epochs between selections; at least update_interval.", own_auto=True, above=0
    )
    update_interval: IntOrAuto = key("auto", "Steps between host updates.", unit="steps", own_auto=True, above=0)
    overlap_step: Bool = key(False, "Overlap the host update with work on the device; needs overlap_comm.")
    offload: Bool = key(False, "Keep the selected part on the host too; needs overlap_comm.")
    auto_ratio: Float = key(0.99, "Threshold of the automatic choice.", minimum=0, maximum=1)
    full_warm_up_rounds: Int = key(0, "Full updates at the start.", unit="steps", minimum=0)
    pt_reserved_cores_perc: Float = key(0.5, "Share of cores left to the main process.", minimum=0, maximum=1)
    steps_per_epoch: Int | None = key(None, "Filled in by the engine.", unit="steps", above=0)


_FLAT = "parameters and gradients always live in flat buckets"
_HANDLES = "autograd saves a handle into a bucket, so no module has to be replaced"
_AGREED = "the order of gathers is agreed between ranks in every run, and a change is reported"


class ZeroOptimization(Section):
    """ZeRO. The stage determines which model states are sharded; the other keys set how much is communicated at once.

    Sizes are in elements, not in bytes: of one collective or of one rank's memory, as each key's description states.
    """

    place = ("zero_optimization",)

    stage: Stage = key(
        0,
        "What is sharded over the data-parallel ranks: 0 nothing; 1 master weights and optimizer state; 2 also "
        "gradients; 3 also parameters.",
    )
    reduce_bucket_size: Int = key(
        500_000_000,
        "Gradients reduced by one collective: neighboring buckets are reduced together up to this size. A larger "
        "value makes fewer calls; a smaller one overlaps earlier and needs less transient memory.",
        unit="elements",
        above=0,
    )
    reduce_scatter: Bool = key(
        True,
        "Reduce each gradient to its owner only.",
        no_effect="the stage decides: sharded gradients are reduced to their owner, replicated ones to all ranks",
    )
    exact_sums: BoolOrAuto = key(
        "auto",
        "Reduce 16-bit gradients by an exchange and one sum in fp32, with the bytes of 16-bit gradients, instead of "
        "by NCCL, which rounds at every rank on the way. It needs memory for a second copy of a bucket in flight. "
        "auto: where more than 64 ranks share a bucket. On gloo sums are always made so. Stages 1 to 3.",
        own_auto=True,
    )
    allgather_bucket_size: Int = key(
        500_000_000,
        "Parameters in one all-gather at most; 0: one parameter. No bucket is larger than this or than "
        "reduce_bucket_size, except for a single larger parameter.",
        unit="elements",
        minimum=0,
    )
    allgather_partitions: Bool = key(
        True, "Gather by all-gather rather than broadcasts.", no_effect="parameters are always published by all-gather"
    )
    overlap_comm: Bool | None = key(None, "Reduce gradients while backward still runs.", null_means="true")
    contiguous_gradients: Bool = key(True, "Copy gradients into one buffer as they are produced.", no_effect=_FLAT)
    round_robin_gradients: Bool = key(
        False,
        "Spread parameters over ranks in turn.",
        no_effect="every rank owns an equal slice of every bucket, so the work is spread already",
    )
    use_multi_rank_bucket_allreduce: Bool = key(
        True,
        "One reduction for a bucket that touches several ranks.",
        no_effect="a bucket is always reduced by one collective",
    )
    ignore_unused_parameters: Bool = key(
        True,
        "true: trainable parameters may get no gradient in a backward. false: such parameters raise an error at "
        "the step, which names them.",
    )
    load_from_fp32_weights: Bool = key(
        True, "true: loading restores the saved master weights. false: it makes them from the 16-bit weights."
    )
    elastic_checkpoint: Bool = key(
        False,
        "Save optimizer state without padding.",
        no_effect="checkpoints load at every stage and number of ranks anyway",
    )
    sub_group_size: Int = key(
        1_000_000_000,
        "Elements that an offloaded optimizer updates at once. 0: as few as possible.",
        unit="elements",
        minimum=0,
    )
    legacy_stage1: Bool = key(
        False, "The stage 1 of releases before 0.5.9.", no_effect="there is one stage 1", removed="0.5.9"
    )
    compute_grad_norm: Bool = key(
        True,
        "Compute the gradient norm at each step.",
        since="0.19.8",
        no_effect="the norm also finds infinite and NaN gradients and costs one pass over the gradients",
    )
    parameter_alignment: Bool = key(
        False,
        "Begin each parameter at a 16-byte boundary of the flat buffer.",
        since="0.19.8",
        no_effect="each parameter begins at a multiple of 64 elements",
    )
    save_muon_momentum_buffer_in_memory: Bool = key(
        False,
        "Keep Muon's momentum on the device (stage 3).",
        no_effect="offload_optimizer determines where optimizer state is kept",
    )
    pipeline_loading_checkpoint: Bool = key(
        False,
        "Broadcast while reading optimizer state (stage 3).",
        no_effect="every rank reads only the slices it owns; nothing is broadcast",
    )

    stage3_prefetch_bucket_size: Int = key(
        50_000_000,
        "Elements that are gathered ahead of their use. The next unit is always gathered ahead, whatever its "
        "size. 0 gathers nothing ahead.",
        unit="elements",
        minimum=0,
        aliases=("prefetch_bucket_size",),
        min_stage=3,
    )
    stage3_param_persistence_threshold: Int = key(
        100_000,
        "Buckets whose parameters are all smaller than this may stay gathered, since gathering them costs more "
        "time than keeping them costs memory. 0 shards everything.",
        unit="elements",
        minimum=0,
        aliases=("param_persistence_threshold",),
        min_stage=3,
    )
    stage3_model_persistence_threshold: Int = key(
        sys.maxsize,
        "Elements that stage3_param_persistence_threshold may keep gathered, in total.",
        unit="elements",
        minimum=0,
        aliases=("model_persistence_threshold",),
        min_stage=3,
    )
    stage3_max_live_parameters: Int = key(
        1_000_000_000,
        "Gathered elements at one time; prefetching stops at this limit. Without this key the largest two neighboring "
        "modules always fit.",
        unit="elements",
        minimum=0,
        aliases=("max_live_parameters",),
        min_stage=3,
    )
    stage3_max_reuse_distance: Int = key(
        1_000_000_000,
        "Keep a parameter gathered if fewer than this many elements of other parameters are used before its next use.",
        unit="elements",
        minimum=0,
        aliases=("max_reuse_distance",),
        min_stage=3,
    )
    agreement: Literal["adapt", "error", "serve"] = key(
        "adapt",
        "What happens when ranks use different modules. error: an error on every rank. serve: all ranks gather "
        "what any of them needs; each forward and each backward costs two more exchanges. adapt: as serve "
        "from the first difference between ranks on; until then without exchanges, except one in each forward whose "
        "learned order leaves parameters out. error makes none.",
        min_stage=3,
    )
    stage3_gather_16bit_weights_on_model_save: Bool = key(
        False,
        "Allow save_16bit_model to gather and write whole 16-bit weights; otherwise it returns False.",
        aliases=("gather_16bit_weights_on_model_save",),
        min_stage=3,
    )
    stage3_module_granularity_threshold: Int = key(
        0,
        "Gather modules smaller than this together, even beyond stage3_prefetch_bucket_size. 0: off.",
        unit="elements",
        minimum=0,
        aliases=("module_granularity_threshold",),
        min_stage=3,
    )
    stage3_use_all_reduce_for_fetch_params: Bool = key(
        False,
        "Gather by all-reduce.",
        aliases=("use_all_reduce_for_fetch_params",),
        min_stage=3,
        no_effect="a bucket is gathered in place by the fastest collective of the backend",
    )
    stage3_allgather_sequential: Bool = key(
        False,
        "One gather per parameter.",
        aliases=("allgather_sequential",),
        since="0.18.5",
        min_stage=3,
        no_effect="parameters are views of one bucket, which is gathered in place without a staging copy",
    )
    memory_efficient_linear: Bool = key(
        True, "Replace torch's linear by one that saves less for backward.", no_effect=_HANDLES
    )
    override_module_apply: Bool = key(
        True,
        "Gather parameters inside Module.apply of a model built under zero.Init.",
        no_effect="Module.apply always sees whole parameters",
    )
    log_trace_cache_warnings: Bool = key(False, "Report changes in the order of modules.", no_effect=_AGREED)
    enable_sanity_checks: Bool = key(False, "Further checks between ranks.", no_effect=_AGREED)
    leaf_module: LeafModule = key(None, "Modules that are gathered as a whole.", factory=LeafModule, min_stage=3)

    offload_param: OffloadParam | None = key(None, "Where parameter shards are kept.", null_means="on the device")
    offload_optimizer: OffloadOptimizer | None = key(
        None, "Where master weights and optimizer state are kept.", null_means="on the device"
    )

    zero_hpz_partition_size: Int = key(
        1,
        "Neighboring ranks over which parameters are sharded, so that gathers stay among them (ZeRO++ hpZ); "
        "gradients, master weights and optimizer state are sharded over all ranks. Must divide the number of "
        "ranks. 0 and 1: off.",
        unit="ranks",
        minimum=0,
        min_stage=3,
    )
    zero_quantized_weights: Bool = key(
        False,
        "Gather parameters in int8 with a scale per block (ZeRO++ qwZ). All ranks compute with the same decoded "
        "weights, whatever their dtype; shards and masters stay exact.",
        min_stage=3,
    )
    zero_quantized_nontrainable_weights: Bool = key(
        False, "Gather in int8 only the weights that are frozen at initialize; their shards stay exact.", min_stage=3
    )
    zero_quantized_gradients: Bool = key(
        False,
        "Exchange gradients in int4 with a scale per block (ZeRO++ qgZ): between neighbors, then, with "
        "zero_hpz_partition_size, between groups. Sums are fp32, and the result is the mean over all ranks.",
        min_stage=3,
    )
    zeropp_loco_param: LocoParam | None = key(
        None,
        "Error feedback for zero_quantized_gradients (LoCo).",
        null_means="what int4 loses is lost",
        min_stage=3,
        removed="0.19.8",
    )
    mics_shard_size: Int = key(
        -1,
        "Neighboring ranks over which all model states are sharded; the other groups are replicas (MiCS). Must "
        "divide the number of ranks. -1 and 0: off.",
        unit="ranks",
        minimum=-1,
        min_stage=3,
        removed="0.19.8",
    )
    mics_hierarchical_params_gather: Bool = key(
        False,
        "If the ranks of mics_shard_size span several nodes, gather in two steps: between ranks with the same "
        "place on their nodes, then inside each node.",
        min_stage=3,
        removed="0.19.8",
    )
    zenflow: ZenFlow | None = key(None, "Importance-aware asynchronous updates.", since="0.17.5")

    cpu_offload_use_pin_memory: Bool | None = key(
        None,
        "From early releases.",
        aliases=("cpu_offload_pin_memory",),
        no_effect="use pin_memory of offload_optimizer and offload_param",
    )
    grad_hooks: Bool | None = key(None, "From early releases.", no_effect="gradients are always taken by hooks")
