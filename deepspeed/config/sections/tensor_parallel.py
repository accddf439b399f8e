"""``tensor_parallel``: AutoTP training."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from deepspeed.config.section import Section, key
from deepspeed.config.types import AnyCase, Bool, DType, Int, TextList


class TpGroup(Section):
    """The tensor-parallel group."""

    tp_size: Int = key(1, "Tensor-parallel degree; 1 or autotp_size.", unit="ranks", above=0)
    tp_grain_size: Int = key(1, "Granularity of uneven splits.", above=0)
    mpu: Any = key(None, "Megatron-style object with the process groups; only from a program.")
    tp_group: Any = key(None, "Process group; only from a program, and not with mpu.")


class LayerPartition(Section):
    """Describes how one kind of layer is split."""

    patterns: TextList = key(None, "Regular expressions for parameter names.", factory=list)
    partition_type: Annotated[Literal["column", "row", "skip"], AnyCase] = key("column", "How the layer is split.")
    shape: list[Any] | None = key(None, "Shape to view the weight in before splitting, for fused weights.")
    partition_dim: Int | None = key(None, "Dimension to split.", minimum=0, null_means="0 for column, 1 for row")
    model_types: TextList | None = key(None, "Use the rule only for these model types.")
    gather_output: Bool = key(False, "Gather the output of a column-parallel layer.")
    grad_allreduce: Bool = key(False, "All-reduce the gradient of a replicated weight.")


class PartitionConfig(Section):
    """Rules for splitting layers."""

    tp_size: Int = key(1, "Degree.", unit="ranks", above=0, no_effect="autotp_size is the tensor-parallel degree")
    use_default_specs: Bool = key(True, "Add the built-in rules.")
    strict_mode: Bool = key(False, "Raise an error for a layer without a rule.")
    embedding_partition_dim: Int = key(
        1,
        "Dimension along which embeddings are split.",
        minimum=0,
        no_effect="embeddings are split over the vocabulary, or stay whole",
    )
    lm_head_patterns: TextList = key(None, "Names of output layers.", factory=lambda: ["lm_head", "embed_out"])
    layer_specs: list[LayerPartition] = key(None, "Rules, in order.", factory=list)


class TensorParallel(Section):
    """Tensor-parallel training without changes to the model (AutoTP)."""

    switch_name = "autotp_size"

    autotp_size: Int = key(0, "Tensor-parallel degree; 0: off.", unit="ranks", minimum=0)
    dtype: DType = key("fp16", "Dtype of the model.", no_effect="bf16, fp16 and the model's own dtype decide")
    tp_overlap_comm: Bool = key(
        False,
        "Overlap reductions with computation.",
        no_effect="the gradient of an input is always reduced while that of the weight is computed",
    )
    tensor_parallel: TpGroup = key(None, "The tensor-parallel group.", factory=TpGroup, aliases=("tp",))
    injection_policy_tuple: TextList | None = key(None, "Names of the row-parallel layers of a block.")
    preset_model: (
        Annotated[
            Literal["llama", "bloom", "chatglm", "mixtral", "deepseek_v2", "qwen2", "phi3"],
            AnyCase,
        ]
        | None
    ) = key(None, "Use the rules of this kind of model.")
    partition_config: PartitionConfig | None = key(None, "Rules for splitting layers.")
    verify: Bool | None = key(
        None,
        "Compare a small forward and backward of the sharded model with those of the whole model.",
        null_means="true for models below 300 million parameters",
    )
    sequence_parallel_norms: Bool = key(
        False,
        "Shard activations between tensor-parallel layers along the sequence: norms and residual sums work on a "
        "part of it (Megatron's sequence parallelism).",
    )
    keep_module_on_host: Bool = key(
        False, "Split layers in host memory.", no_effect="layers are split where they are, one after the other"
    )
    replace_with_kernel_inject: Bool = key(
        False,
        "Replace layers by fused ones, as in inference.",
        aliases=("kernel_inject",),
        no_effect="layers that train are not replaced by kernels",
    )
    vocab_parallel_lm_head: Bool | None = key(
        None,
        "Split the output layer over the vocabulary; logits stay split, and the loss is computed from their parts.",
        since="0.19.8",
        null_means="split if the model's tensor-parallel plan splits it, and gather the logits",
    )
    vocab_parallel_ce_backend: Annotated[Literal["torch", "liger"], AnyCase] = key(
        "torch",
        'Loss for a split output layer. "torch": of the split logits. "liger": of the hidden states, as with '
        "fused_loss, so that split logits never exist as a whole; the same as torch in a pipeline.",
        since="0.19.8",
        feature="deepspeed.fast_path.fused_loss",
    )
