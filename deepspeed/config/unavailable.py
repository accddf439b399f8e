"""The features that have a key but do not exist yet: the one list of them.

A feature that comes into being deletes its row here and nothing else. A key is refused only where it switches such a
feature on; its section may stand in the file switched off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from deepspeed.config.findings import Findings, Path, shown
from deepspeed.config.sections.root import Root


@dataclass(frozen=True)
class Unavailable:
    """A feature that does not exist yet.

    Attributes:
        key: The dotted key that would switch it on.
        switched_on: Whether a value of that key does; never asked about an absent section.
        feature: What it is, for lists.
        instead: What to do meanwhile.
        idle_at_stage_0: At stage 0 the key means nothing and is let pass.
    """

    key: str
    switched_on: Callable[[Any], bool]
    feature: str
    instead: str
    idle_at_stage_0: bool = False

    @property
    def path(self) -> Path:
        """The key as a path."""
        return tuple(self.key.split("."))


def _true(value: Any) -> bool:
    return value is True


def _present(value: Any) -> bool:
    return value is not None


def _above(limit: int) -> Callable[[Any], bool]:
    return lambda value: value > limit


_OFF = "set it to false or leave the section out"
_PRUNING = "prune outside training"

UNAVAILABLE: tuple[Unavailable, ...] = (
    Unavailable("zero_optimization.offload_optimizer.super_offload", _true, "SuperOffload", _OFF, True),
    Unavailable("zero_optimization.zenflow", _present, "ZenFlow", "leave the section out"),
    Unavailable("zero_optimization.zero_quantized_weights", _true, "Quantized gathers (ZeRO++ qwZ)", _OFF),
    Unavailable("zero_optimization.zero_quantized_nontrainable_weights", _true, "Quantized frozen weights", _OFF),
    Unavailable("zero_optimization.zero_quantized_gradients", _true, "Quantized reductions (ZeRO++ qgZ)", _OFF),
    Unavailable("zero_optimization.zeropp_loco_param", _present, "Error feedback (LoCo)", "leave the section out"),
    Unavailable("fp16.fp16_master_weights_and_grads", _true, "fp16 master weights", "keep fp32 master weights: false"),
    Unavailable("bf16.bf16_master_weights_and_grads", _true, "bf16 master weights", "keep fp32 master weights: false"),
    Unavailable("bf16.bf16_optimizer_states", _true, "bf16 optimizer state", "keep fp32 optimizer state: false"),
    Unavailable("amp.enabled", _true, "Apex mixed precision", "use bf16, fp16 or torch_autocast"),
    Unavailable("msamp.enabled", _true, "MS-AMP", "use bf16, fp16 or torch_autocast"),
    Unavailable("sparse_gradients", _true, "Sparse gradient reduction", "set it to false"),
    Unavailable("sequence_parallel_size", _above(1), "Sequence parallelism", "set it to 1"),
    Unavailable("tensor_parallel.autotp_size", _above(1), "Tensor-parallel training (AutoTP)", "set it to 0"),
    Unavailable(
        "tensor_parallel.tensor_parallel.tp_size", _above(1), "Tensor-parallel training (AutoTP)", "set it to 1"
    ),
    Unavailable("expert_parallel.enabled", _true, "Expert parallelism (AutoEP)", _OFF),
    Unavailable("compile.deepcompile", _true, "DeepCompile", "set it to false; engine.compile() needs none of it"),
    Unavailable("hybrid_engine.enabled", _true, "The hybrid engine", _OFF),
    Unavailable("elasticity.enabled", _true, "Elastic batch sizes", "set the batch keys"),
    Unavailable("autotuning.enabled", _true, "Autotuning", _OFF),
    Unavailable("data_efficiency.enabled", _true, "Curriculum learning and token dropping", _OFF),
    Unavailable("curriculum_learning.enabled", _true, "Curriculum learning", _OFF),
    Unavailable("progressive_layer_drop.enabled", _true, "Progressive layer dropping", _OFF),
    Unavailable("compression_training.layer_reduction.enabled", _true, "Layer reduction", _OFF),
    Unavailable(
        "compression_training.weight_quantization.shared_parameters.enabled", _true, "Quantization-aware training", _OFF
    ),
    Unavailable(
        "compression_training.activation_quantization.shared_parameters.enabled",
        _true,
        "Quantization-aware training",
        _OFF,
    ),
    Unavailable("compression_training.sparse_pruning.shared_parameters.enabled", _true, "Pruning", _PRUNING),
    Unavailable("compression_training.row_pruning.shared_parameters.enabled", _true, "Pruning", _PRUNING),
    Unavailable("compression_training.channel_pruning.shared_parameters.enabled", _true, "Pruning", _PRUNING),
    Unavailable("compression_training.head_pruning.shared_parameters.enabled", _true, "Pruning", _PRUNING),
    Unavailable("weight_quantization.enabled", _true, "Weight-only quantization", _OFF),
    Unavailable("quantize_training.enabled", _true, "Quantized training", _OFF),
    Unavailable("eigenvalue.enabled", _true, "Eigenvalues for quantization", _OFF),
    Unavailable("sparse_attention", _present, "Block-sparse attention", "leave the section out"),
    Unavailable("checkpoint.writer", _present, "The separate checkpoint writer", "leave the section out"),
    Unavailable("datastates_ckpt", _present, "DataStates checkpoints", "leave the section out"),
    Unavailable("nebula.enabled", _true, "Nebula checkpoints", _OFF),
)


def value_at(root: Root, path: Path) -> Any:
    """The value of a key; None when a section on the way is absent."""
    value: Any = root
    for part in path:
        if value is None:
            return None
        value = getattr(value, str(part))
    return value


def refuse_unavailable(root: Root, findings: Findings) -> None:
    """Reports every row that the configuration switches on."""
    stage = root.zero_optimization.stage
    for row in UNAVAILABLE:
        value = value_at(root, row.path)
        if value is None or not row.switched_on(value) or (stage == 0 and row.idle_at_stage_0):
            continue
        found = "" if hasattr(value, "model_fields_set") else f" ({shown(value)})"
        findings.problem(row.path, f"{row.feature}{found} does not exist here yet; {row.instead}")


def missing_features() -> Iterator[tuple[str, str]]:
    """Feature and key of every row, for the documentation and ``ds_report``."""
    for row in UNAVAILABLE:
        yield row.feature, row.key
