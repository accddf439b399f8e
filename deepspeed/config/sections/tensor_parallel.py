"""``tensor_parallel``: AutoTP training."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from deepspeed.config.section import Section, key
from deepspeed.config.types import AnyCase, Bool, DType, Int, TextList


class TpGroup(Section):
    """The tensor-parallel group."""

    tp_size: Int = key(1, "Degree; 1 or autotp_size.", unit="ranks", above=0)
    tp_grain_size: Int = key(1, "Granularity of uneven splits.", above=0)
    mpu: Any = key(None, "Object that knows the groups; only from a program.")
    tp_group: Any = key(None, "Process group; only from a program, and not with mpu.")


class LayerPartition(Section):
    """How one kind of layer is split."""

    patterns: TextList = key(None, "Regular expressions for parameter names.", factory=list)
    partition_type: Annotated[Literal["column", "row", "skip"], AnyCase] = key("column", "Split.")
    shape: list[Any] | None = key(None, "View before splitting, for fused weights.")
    partition_dim: Int | None = key(None, "Axis.", minimum=0, null_means="0 for column, 1 for row")
    model_types: TextList | None = key(None, "Only for these kinds of model.")
    gather_output: Bool = key(False, "Gather after a column split.")
    grad_allreduce: Bool = key(False, "Reduce the gradient of a replicated weight.")


class PartitionConfig(Section):
    """Own rules of splitting."""

    tp_size: Int = key(1, "Degree.", unit="ranks", above=0, no_effect="autotp_size says how many ranks share a layer")
    use_default_specs: Bool = key(True, "Add the built-in rules.")
    strict_mode: Bool = key(False, "A layer without a rule is an error.")
    embedding_partition_dim: Int = key(
        1, "Axis of embeddings.", minimum=0, no_effect="embeddings are cut over the vocabulary, or stay whole"
    )
    lm_head_patterns: TextList = key(None, "Names of output layers.", factory=lambda: ["lm_head", "embed_out"])
    layer_specs: list[LayerPartition] = key(None, "Rules, in order.", factory=list)


class TensorParallel(Section):
    """Tensor-parallel training without changes to the model (AutoTP)."""

    switch_name = "autotp_size"

    autotp_size: Int = key(0, "Degree; 0 is off.", unit="ranks", minimum=0)
    dtype: DType = key("fp16", "Type of the model.", no_effect="bf16, fp16 and the model's own type decide")
    tp_overlap_comm: Bool = key(
        False,
        "Overlap the reductions with compute.",
        no_effect="the gradient of an input always travels while that of the weight is computed",
    )
    tensor_parallel: TpGroup = key(None, "The tensor-parallel group.", factory=TpGroup, aliases=("tp",))
    injection_policy_tuple: TextList | None = key(None, "Names of row-parallel outputs.")
    preset_model: (
        Annotated[
            Literal["llama", "bloom", "chatglm", "mixtral", "deepseek_v2", "qwen2", "phi3"],
            AnyCase,
        ]
        | None
    ) = key(None, "Ready rules.")
    partition_config: PartitionConfig | None = key(None, "Own rules.")
    verify: Bool | None = key(
        None,
        "Compare a small forward and backward of the cut model with the whole one.",
        null_means="where the model has fewer than 300 million parameters",
    )
    sequence_parallel_norms: Bool = key(
        False,
        "Cut activations between cut layers along the sequence: norms and residual sums work on a part of it.",
    )
    keep_module_on_host: Bool = key(
        False, "Split on the host.", no_effect="layers are cut where they are, one after the other"
    )
    replace_with_kernel_inject: Bool = key(
        False, "As in inference.", aliases=("kernel_inject",), no_effect="layers that train are not replaced by kernels"
    )
    vocab_parallel_lm_head: Bool | None = key(
        None,
        "Split the output layer over the vocabulary; logits stay split, and the loss is computed from their parts.",
        since="0.19.8",
        null_means="split where the model's plan says so, with logits that are gathered",
    )
    vocab_parallel_ce_backend: Annotated[Literal["torch", "liger"], AnyCase] = key(
        "torch", "Loss for a split output layer.", since="0.19.8", no_effect="there is one loss, written in torch"
    )
