"""Contradictions between keys. Each rule is a few lines and names the keys."""

from __future__ import annotations

import re
from typing import Any

from deepspeed.config.data_rules import check_data
from deepspeed.config.elastic_rules import check_elasticity
from deepspeed.config.messages import ConfigMessages, Path, dotted
from deepspeed.config.sections.checkpoint import CATCHABLE, Preemption
from deepspeed.config.sections.compression import CompressionTraining, LayerReduction, SparsePruning
from deepspeed.config.sections.optimizer import Optimizer
from deepspeed.config.sections.root import Root
from deepspeed.config.sections.zero import ZeroOptimization

ZERO = "zero_optimization"
STAGE: Path = (ZERO, "stage")


def check_rules(root: Root, findings: ConfigMessages) -> None:
    """Reports every contradiction in a configuration whose single values are valid."""
    _precision(root, findings)
    _offload(root.zero_optimization, findings)
    _reduction(root, findings)
    if root.optimizer is not None:
        _optimizer(root, root.optimizer, findings)
    _structure(root, findings)
    _tensor_parallel(root, findings)
    _neighbors(root.zero_optimization, findings)
    _codes(root, findings)
    _zero_plus_plus(root.zero_optimization, findings)
    if root.checkpoint.writer is not None and root.checkpoint.writer.type == "mock":
        findings.problem(
            ("checkpoint", "writer", "type"),
            'found "mock", which writes nothing, expected "fast" or "python". Leave the key out to save checkpoints',
        )
    check_data(root, findings)
    check_elasticity(root, findings)
    check_compression(root, findings)
    check_quantize_training(root, findings)


def check_ranks(root: Root, dp_world_size: int, findings: ConfigMessages) -> None:
    """Reports keys that do not fit the number of data-parallel ranks."""
    zero = root.zero_optimization
    if zero.stage < 3:
        return
    for name in ("zero_hpz_partition_size", "mics_shard_size"):
        size = getattr(zero, name)
        is_capped = name == "zero_hpz_partition_size" and size > dp_world_size
        if is_capped:
            findings.warning(
                f"{findings.label((ZERO, name))} {size} has no effect: expected a divisor of the number of "
                f"data-parallel ranks ({dp_world_size}), so all of them share the parameters. Choose a divisor, or "
                "leave the key out"
            )
        if size > 0 and dp_world_size % size and not is_capped:
            fitting = [str(n) for n in range(2, dp_world_size + 1) if dp_world_size % n == 0]
            findings.problem(
                (ZERO, name),
                f"{size} does not divide the number of data-parallel ranks, {dp_world_size}; "
                f"{', '.join(fitting) or 'only 1'} would",
            )
    if zero.mics_shard_size == 1 and dp_world_size > 1:
        findings.problem(
            (ZERO, "mics_shard_size"),
            f"1 would keep every model state whole on each of the {dp_world_size} ranks; that is "
            "zero_optimization.stage 0, or give a larger number",
        )


def _neighbors(zero: ZeroOptimization, findings: ConfigMessages) -> None:
    if zero.stage < 3:
        return
    hpz, mics = (ZERO, "zero_hpz_partition_size"), (ZERO, "mics_shard_size")
    is_hpz, is_mics = zero.zero_hpz_partition_size > 1, zero.mics_shard_size > 0
    if is_hpz and is_mics:
        findings.problem(
            mics,
            "zero_hpz_partition_size and mics_shard_size both choose which ranks share the parameters; keep one",
            hpz,
        )
    if (is_hpz or is_mics) and zero.offload_param is not None and zero.offload_param.device != "none":
        findings.problem(
            hpz if is_hpz else mics,
            f'cannot be combined with zero_optimization.offload_param.device "{zero.offload_param.device}": copies for '
            "near gathers and parameters kept off the device contradict each other; drop one of them",
            (ZERO, "offload_param", "device"),
        )


def _codes(root: Root, findings: ConfigMessages) -> None:
    section, zero = root.communication_compression, root.zero_optimization
    at: Path = ("communication_compression",)
    if section.block is not None and section.block & (section.block - 1):
        findings.problem((*at, "block"), f"expected a power of 2 from 8 to 262144, found {section.block}")
    if section.warm_up is not None and section.gradients == "auto":
        findings.problem((*at, "warm_up"), 'gradients "auto" chooses the codec by a measurement; keep one of them')
    if section.weights is not None and zero.stage < 3:
        findings.problem(
            (*at, "weights"),
            "parameters are gathered for forward and backward at zero_optimization.stage 3 only, found stage "
            f"{zero.stage}; set the stage to 3 or leave the key out",
            STAGE,
        )
    for name, other in (("weights", "zero_quantized_weights"), ("gradients", "zero_quantized_gradients")):
        if getattr(section, name) is not None and getattr(zero, other) and zero.stage == 3:
            findings.problem((*at, name), f"does the same as {ZERO}.{other}; keep one of them", (ZERO, other))


def _zero_plus_plus(zero: ZeroOptimization, findings: ConfigMessages) -> None:
    loco = zero.zeropp_loco_param
    if zero.stage < 3 or loco is None:
        return
    at: Path = (ZERO, "zeropp_loco_param")
    if not zero.zero_quantized_gradients:
        findings.problem(
            at,
            "keeps the coding error of gradients, but gradients are not coded; set zero_quantized_gradients "
            "to true or leave the section out",
            (ZERO, "zero_quantized_gradients"),
        )
    for name, usual in (("err_beta", "0.8"), ("reset_T", "1024")):
        if getattr(loco, name) is None:
            findings.problem((*at, name), f"has no default, expected a number such as {usual}")


def _precision(root: Root, findings: ConfigMessages) -> None:
    fp16, bf16 = ("fp16", "enabled"), ("bf16", "enabled")
    if root.fp16.enabled and root.bf16.enabled:
        findings.problem(
            bf16, "fp16.enabled and bf16.enabled are both true; a model has one precision, choose one", fp16
        )
    islands = root.communication_compression.islands
    for section, name in (("fp16", "fp16_master_weights_and_grads"), ("bf16", "bf16_master_weights_and_grads")):
        if getattr(root, section).enabled and getattr(getattr(root, section), name) and islands is not None:
            findings.problem(
                (section, name),
                "cannot be combined with communication_compression.islands, which exchange the movements of "
                "fp32 masters; set it to false or leave the islands out",
                ("communication_compression", "islands"),
            )
    if root.bf16.bf16_optimizer_states and not root.bf16.bf16_master_weights_and_grads:
        findings.problem(
            ("bf16", "bf16_optimizer_states"),
            "needs bf16.bf16_master_weights_and_grads: true as well",
            ("bf16", "bf16_master_weights_and_grads"),
        )
    stated = root.data_types.param_dtype
    actual = "fp16" if root.fp16.enabled else "bf16" if root.bf16.enabled else "fp32"
    if stated is not None and stated != actual and not (root.fp16.enabled and root.bf16.enabled):
        findings.problem(
            ("data_types", "param_dtype"),
            f"states {stated}, but fp16.enabled and bf16.enabled give {actual}; make them agree",
            fp16,
            bf16,
        )
    half = root.fp16
    if half.enabled and half.loss_scale == 0 and half.min_loss_scale > 2**half.initial_scale_power:
        findings.problem(
            ("fp16", "min_loss_scale"),
            f"expected at most the scale at the start, 2 to the power of {half.initial_scale_power}, found "
            f"{half.min_loss_scale:g}",
            ("fp16", "initial_scale_power"),
        )


def _offload(zero: ZeroOptimization, findings: ConfigMessages) -> None:
    param, optimizer = zero.offload_param, zero.offload_optimizer
    at: Path = (ZERO, "offload_param", "device")
    if zero.stage == 3 and param is not None and param.device == "nvme" and param.nvme_path is None:
        findings.problem(
            at,
            '"nvme" needs zero_optimization.offload_param.nvme_path, a folder; none is given',
            (ZERO, "offload_param", "nvme_path"),
        )
    if optimizer is None or zero.stage == 0:
        return
    at = (ZERO, "offload_optimizer", "device")
    if optimizer.device == "nvme":
        if optimizer.nvme_path is None:
            findings.problem(
                at,
                '"nvme" needs zero_optimization.offload_optimizer.nvme_path, a folder; none is given',
                (ZERO, "offload_optimizer", "nvme_path"),
            )
        if optimizer.super_offload:
            findings.problem(
                (ZERO, "offload_optimizer", "super_offload"),
                'needs zero_optimization.offload_optimizer.device "cpu", found "nvme": states in files are updated '
                "through buffers, after the norm is known. Change the device, or set super_offload to false",
                at,
            )
    if optimizer.update == "device":
        on_host = "updates masters in host memory through the device"
        if optimizer.device != "cpu":
            findings.problem(
                (ZERO, "offload_optimizer", "update"),
                f'"device" {on_host}: it needs zero_optimization.offload_optimizer.device "cpu", found '
                f'"{optimizer.device}". Change the device, or set update to "host"',
                at,
            )
        if optimizer.super_offload:
            findings.problem(
                (ZERO, "offload_optimizer", "update"),
                f'"device" {on_host} after the norm is known, found super_offload true, which updates on the host '
                'before. Set one of them to its default: update to "host", or super_offload to false',
                (ZERO, "offload_optimizer", "super_offload"),
            )
        if zero.stage == 3 and param is not None and param.device == "nvme":
            findings.problem(
                (ZERO, "offload_optimizer", "update"),
                '"device" writes parameters on the device or in host memory, found '
                'zero_optimization.offload_param.device "nvme". Set update to "host", or offload_param.device to "cpu"',
                (ZERO, "offload_param", "device"),
            )
    if optimizer.ratio < 1 and zero.stage < 3:
        findings.problem(
            (ZERO, "offload_optimizer", "ratio"),
            f"below 1 needs zero_optimization.stage 3, found stage {zero.stage}",
            STAGE,
        )


def _reduction(root: Root, findings: ConfigMessages) -> None:
    if root.zero_optimization.exact_sums is True and root.zero_optimization.stage == 0:
        findings.problem(
            (ZERO, "exact_sums"),
            "true needs zero_optimization.stage 1, 2 or 3, found stage 0, where all ranks sum all gradients. Choose "
            'another stage, or set exact_sums to "auto"',
            STAGE,
        )
    if root.gradient_allreduce_op == "sum" and root.zero_optimization.stage == 3:
        findings.problem(
            ("gradient_allreduce_op",), '"sum" cannot be combined with zero_optimization.stage 3; use "mean"', STAGE
        )


def _optimizer(root: Root, optimizer: Optimizer, findings: ConfigMessages) -> None:
    params: dict[str, Any] = optimizer.params
    if optimizer.type == "Lamb" and root.fp16.enabled and root.fp16.loss_scale != 0:
        findings.problem(
            ("fp16", "loss_scale"),
            f"Lamb needs the dynamic loss scale 0, found {root.fp16.loss_scale:g}",
            ("fp16", "enabled"),
        )
    if params.get("nesterov") and (params.get("momentum", 0) <= 0 or params.get("dampening", 0) != 0):
        findings.problem(
            ("optimizer", "params", "nesterov"),
            f"needs momentum > 0 and dampening 0, found momentum {params.get('momentum', 0):g} and dampening "
            f"{params.get('dampening', 0):g}",
            ("optimizer", "params", "momentum"),
            ("optimizer", "params", "dampening"),
        )
    if params.get("foreach") and params.get("fused"):
        findings.problem(("optimizer", "params", "fused"), "foreach and fused are both true; choose one")


def _tensor_parallel(root: Root, findings: ConfigMessages) -> None:
    section, size = root.tensor_parallel, ("tensor_parallel", "autotp_size")
    if section.sequence_parallel_norms and section.autotp_size > 1 and root.sequence_parallel.tiled_mlp:
        findings.problem(
            ("tensor_parallel", "sequence_parallel_norms"),
            "each tile of tokens would be divided over the ranks, so tokens would change places. Set one of the two "
            "to false",
            ("sequence_parallel", "tiled_mlp"),
        )
    group = section.tensor_parallel
    path = ("tensor_parallel", "tensor_parallel")
    if group.tp_size not in (1, max(section.autotp_size, 1)):
        findings.problem(
            (*path, "tp_size"), f"expected 1 or autotp_size {section.autotp_size}, found {group.tp_size}", size
        )
    for name, instead in (("mpu", "initialize(mpu=...)"), ("tp_group", "deepspeed.tp_model_init(tp_group=...)")):
        if getattr(group, name) is not None:
            findings.problem((*path, name), f"an object cannot be in a configuration; pass it to {instead}")


def _structure(root: Root, findings: ConfigMessages) -> None:
    """Checks single values beyond type and interval."""
    if root.hybrid_engine is not None and root.hybrid_engine.inference_tp_size > 1:
        findings.problem(
            ("hybrid_engine", "inference_tp_size"),
            f"{root.hybrid_engine.inference_tp_size}: layers are cut for training and generating alike; use "
            "tensor_parallel.autotp_size, and 1 here",
        )
    if root.preemption is not None:
        _preemption(root.preemption, findings)
    if root.autotuning is not None:
        for name in ("results_dir", "exps_dir"):
            if not getattr(root.autotuning, name):
                findings.problem(("autotuning", name), "expected the name of a folder, found an empty text")
    if root.expert_parallel is not None:
        for name in ("expert_w1", "expert_w2", "expert_w3"):
            value = getattr(root.expert_parallel, name)
            if value is not None and (not value or "." in value):
                findings.problem(("expert_parallel", name), f'expected a name without dots, found "{value}"')


def _preemption(section: Preemption, findings: ConfigMessages) -> None:
    if section.enabled and not section.save_dir:
        findings.problem(("preemption", "save_dir"), "expected a folder with preemption.enabled: true, found none")
    for name in section.signals:
        if name not in CATCHABLE:
            findings.problem(
                ("preemption", "signals"), f"expected names of signals such as SIGTERM and SIGUSR1, found {name!r}"
            )


AT: Path = ("compression_training",)
_REQUIRED = {
    "weight_quantization": ("start_bits", "target_bits"),
    "activation_quantization": ("bits",),
    "sparse_pruning": ("dense_ratio",),
    "row_pruning": ("dense_ratio",),
    "channel_pruning": ("dense_ratio",),
    "head_pruning": ("dense_ratio",),
}
"""The keys that each group's ``params`` must have, by technique."""
_OF_SNIP = {"block_pattern", "dense_ratio", "schedule_offset_stride", "schedule_offset_end", "excluded_modules"}
LEAST_LEVELS = 3
"""Least bits of codes that are levels of an interval; codes of fewer bits are signs."""


def check_compression(root: Root, findings: ConfigMessages) -> None:
    """Reports missing and contradictory keys of the techniques that are switched on."""
    section = root.compression_training
    if section is None:
        return
    if section.layer_reduction is not None and section.layer_reduction.enabled:
        _layers(section.layer_reduction, findings)
    for name, required in _REQUIRED.items():
        technique = getattr(section, name)
        if technique is None or not technique.shared_parameters.enabled:
            continue
        by_snip = name == "sparse_pruning" and technique.shared_parameters.method == "snip_momentum"
        if not technique.different_groups and not by_snip:
            findings.problem((*AT, name, "different_groups"), "is required once the technique is enabled, and missing")
        for group, settings in technique.different_groups.items():
            at: Path = (*AT, name, "different_groups", group)
            for key in required:
                if getattr(settings.params, key) is None and not by_snip:
                    findings.problem((*at, "params", key), "is required, and missing")
            if not settings.modules:
                findings.problem((*at, "modules"), "expected at least one part of a name, found none")
    _widths(section, findings)
    sparse = section.sparse_pruning
    if sparse is not None and sparse.shared_parameters.enabled:
        _sparse(sparse, findings)
    heads = section.head_pruning
    if heads is not None and heads.shared_parameters.enabled and heads.shared_parameters.num_heads is None:
        findings.problem((*AT, "head_pruning", "shared_parameters", "num_heads"), "is required, and missing")


def _sparse(section: SparsePruning, findings: ConfigMessages) -> None:
    at: Path = (*AT, "sparse_pruning", "shared_parameters")
    shared = section.shared_parameters
    if shared.method != "snip_momentum":
        if idle := sorted(shared.model_fields_set & _OF_SNIP):
            findings.notice(f"{dotted(at)}: {', '.join(idle)} act with the method snip_momentum alone")
        return
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", shared.block_pattern):
        findings.problem((*at, "block_pattern"), f"expected ROWSxCOLUMNS, such as 4x1, found {shared.block_pattern!r}")
    if shared.schedule_offset < 1:
        findings.problem((*at, "schedule_offset"), "expected at least 1, as scores are computed from updates; found 0")
    end = shared.schedule_offset_end
    if end is not None and end < shared.schedule_offset:
        findings.problem(
            (*at, "schedule_offset_end"),
            f"{end} is before schedule_offset {shared.schedule_offset}",
            (*at, "schedule_offset"),
        )
    for name, group in section.different_groups.items():
        if group.params.dense_ratio not in (None, shared.dense_ratio):
            findings.problem(
                (*AT, "sparse_pruning", "different_groups", name, "params", "dense_ratio"),
                f"{group.params.dense_ratio:g}: snip_momentum compares all layers with each other, so there is one "
                "shared_parameters.dense_ratio; leave this one out",
            )
        if group.related_modules:
            findings.problem(
                (*AT, "sparse_pruning", "different_groups", name, "related_modules"),
                "blocks of weights cannot be removed from other layers; leave the key out",
            )


def _layers(section: LayerReduction, findings: ConfigMessages) -> None:
    at: Path = (*AT, "layer_reduction")
    for name in ("module_name_prefix", "teacher_layer"):
        if getattr(section, name) is None:
            findings.problem((*at, name), "is required once layers are reduced, and missing")
    count, chosen = section.keep_number_layer, section.teacher_layer
    if count is not None and chosen is not None and count != len(chosen):
        findings.problem(
            (*at, "keep_number_layer"), f"{count}, but {len(chosen)} layers are named", (*at, "teacher_layer")
        )


def check_quantize_training(root: Root, findings: ConfigMessages) -> None:
    """Reports a period of 0 between falls of bits in ``quantize_training``."""
    section = root.quantize_training
    if section is None or not section.enabled:
        return
    bits = section.quantize_bits
    if bits.start_bits > bits.target_bits:
        at: Path = ("quantize_training", "quantize_schedule", "quantize_period")
        _period(section.quantize_schedule.quantize_period, bits.start_bits, bits.target_bits, at, findings)


def _period(period: int, start: int, target: int, at: Path, findings: ConfigMessages) -> None:
    """Reports a period of 0 where bits fall from ``start`` to ``target``."""
    if period == 0:
        findings.problem(
            at,
            f"0: expected at least 1 step, as bits fall from {start} to {target}. Give a period, or equal start_bits "
            "and target_bits",
        )


def _widths(section: CompressionTraining, findings: ConfigMessages) -> None:
    activations = section.activation_quantization
    if activations is not None and activations.shared_parameters.enabled:
        for name, group in activations.different_groups.items():
            bits = group.params.bits
            if bits is not None and not LEAST_LEVELS <= bits <= 16:
                at: Path = (*AT, "activation_quantization", "different_groups", name, "params", "bits")
                findings.problem(at, f"{bits}: activations can have {LEAST_LEVELS} to 16 bits")
    weights = section.weight_quantization
    if weights is None or not weights.shared_parameters.enabled:
        return
    shared: Any = weights.shared_parameters
    for name, widths in weights.different_groups.items():
        at = (*AT, "weight_quantization", "different_groups", name, "params")
        start, target = widths.params.start_bits, widths.params.target_bits
        if start is None or target is None:
            continue
        if start < target:
            findings.problem((*at, "start_bits"), f"{start} is less than target_bits {target}", (*at, "target_bits"))
        elif start > target and not shared.quantize_weight_in_forward:
            _period(widths.params.quantization_period, start, target, (*at, "quantization_period"), findings)
        if start > 32:
            findings.problem((*at, "start_bits"), f"{start}: weights have at most 32 bits")
        common: Path = (*AT, "weight_quantization", "shared_parameters")
        for key, only in (("quantization_type", "symmetric"), ("rounding", "nearest")):
            if target < LEAST_LEVELS and getattr(shared, key) != only:
                findings.problem(
                    (*at, "target_bits"),
                    f"{target}: below {LEAST_LEVELS} bits a weight is a sign, so {key} must be {only}",
                    (*common, key),
                )
