"""The configuration of ``init_inference``: an object of its own, not part of a training configuration."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator

from deepspeed.config.section import Section, key
from deepspeed.config.sections.quantization import QuantType
from deepspeed.config.sections.zero import ZeroOptimization
from deepspeed.config.types import AnyCase, Bool, FilePath, Int, IntList, TextList, to_dtype


def _to_inference_dtype(value: Any) -> Any:
    name = str(value).strip().lower().removeprefix("torch.")
    return "int8" if name == "int8" else to_dtype(value)


class InferenceTp(Section):
    """Tensor parallelism while generating."""

    enabled: Bool = key(True, "Split the model.")
    tp_size: Int = key(1, "Degree.", unit="ranks", above=0)
    tp_grain_size: Int = key(64, "Granularity of uneven splits.", above=0)
    mpu: Any = key(None, "Megatron-style object with the process groups; only from a program.")
    tp_group: Any = key(None, "Process group; only from a program.")


class InferenceMoe(Section):
    """Mixture of experts. Experts stay as the model has them: no key has an effect, and ep_size above 1 is refused."""

    enabled: Bool = key(True, "The model has experts.")
    ep_size: Int = key(1, "Expert-parallel degree.", unit="ranks", above=0)
    num_experts: IntList = key(None, "Experts per layer.", factory=lambda: [1], above=0, aliases=("moe_experts",))
    type: Annotated[Literal["standard", "residual"], AnyCase] = key("standard", "Kind of layer.")
    ep_mp_group: Any = key(None, "Process group; only from a program.")
    ep_group: Any = key(None, "Process group; only from a program.", aliases=("expert_group",))


class QuantizedPart(Section):
    """Quantization of activations. Refused: activations stay in 16 bits; leave the section out."""

    enabled: Bool = key(True, "Quantize.")
    num_bits: Int = key(8, "Bit width.", unit="bits", above=0)
    q_type: QuantType = key(
        "symmetric", "symmetric: a range around zero. asymmetric: from the smallest to the largest value."
    )
    q_groups: Int = key(1, "Number of groups of a weight, each with its own scale.", above=0)


class QuantizedWeights(QuantizedPart):
    """Quantization of weights: by num_bits with dtype int8, by the last two keys with other dtypes."""

    num_bits: Int = key(8, "Bit width: 4 or 8.", unit="bits", above=0)
    q_type: QuantType = key("symmetric", "Given by num_bits: 8 bits are symmetric, 4 bits asymmetric.")
    q_groups: Int = key(
        1,
        "Number of groups of a weight, each with its own scale.",
        above=0,
        no_effect="scales belong to rows (8 bits) or to 64 inputs (4 bits)",
    )
    quantized_initialization: dict[str, Any] = key(None, "All linear layers: {num_bits: 4 or 8}.", factory=dict)
    post_init_quant: dict[str, Any] = key(
        None, "By a part of the names of layers: {num_bits: 4 or 8}; the others stay as dtype.", factory=dict
    )


class QuantizedQkv(Section):
    """Quantization of the attention projections."""

    enabled: Bool = key(True, "Quantize.", no_effect="projections of attention are linear layers like others")


class Quantization(Section):
    """Quantized inference."""

    enabled: Bool = key(True, "Quantize if dtype is int8; false is refused then.")
    activation: QuantizedPart = key(None, "Quantization of activations.", factory=QuantizedPart)
    weight: QuantizedWeights = key(None, "Quantization of weights.", factory=QuantizedWeights)
    qkv: QuantizedQkv = key(None, "Quantization of the attention projections.", factory=QuantizedQkv)


class InferenceCheckpoint(Section):
    """Lists the weight files."""

    checkpoint_dir: FilePath = key(None, "Folder of the weights.")
    save_mp_checkpoint_path: FilePath = key(None, "Folder for the split weights.")
    base_dir: str = key("", "Folder for relative paths.")


class Inference(Section):
    """The configuration of ``init_inference``."""

    replace_with_kernel_inject: Bool = key(
        False,
        "Replace layers by fused ones.",
        aliases=("kernel_inject",),
        no_effect="the model keeps its own modules, whose attention torch fuses",
    )
    dtype: Annotated[Literal["fp32", "fp16", "bf16", "int8"], BeforeValidator(_to_inference_dtype)] = key(
        "fp16",
        "Dtype in which the model computes, in any spelling. int8: weights have quant.weight.num_bits bits, and it "
        "computes in bf16.",
    )
    tensor_parallel: InferenceTp = key(None, "Tensor parallelism.", factory=InferenceTp, aliases=("tp",))
    enable_cuda_graph: Bool = key(False, "generate runs through a CUDA graph; not with zero or tp_size above 1.")
    use_triton: Bool = key(False, "Triton kernels.", no_effect="torch chooses the kernels")
    triton_autotune: Bool = key(False, "Tune the Triton kernels.", no_effect="torch chooses the kernels")
    zero: ZeroOptimization = key(
        None, "ZeRO, as in training: stage 3, or 0 for none; other stages are refused.", factory=ZeroOptimization
    )
    triangular_masking: Bool = key(True, "Causal attention.", aliases=("tm",), no_effect="masks are the model's own")
    moe: Annotated[
        InferenceMoe, BeforeValidator(lambda value: {"enabled": value} if isinstance(value, bool) else value)
    ] = key(None, "Mixture of experts.", factory=InferenceMoe)
    keep_module_on_host: Bool = key(False, "Keep the model in host memory.")
    quant: Quantization = key(None, "Quantization.", factory=Quantization)
    checkpoint: str | dict[str, Any] | None = key(None, "Weight files to load.")
    base_dir: str = key("", "Folder for relative paths.")
    set_empty_params: Bool = key(
        False, "Build the model without weights.", no_effect="a model on the meta device is filled from its checkpoint"
    )
    save_mp_checkpoint_path: FilePath = key(None, "Folder for the split weights.")
    checkpoint_config: InferenceCheckpoint = key(
        None, "Where the weight files are.", factory=InferenceCheckpoint, aliases=("ckpt_config",)
    )
    return_tuple: Bool = key(True, "Layers return tuples.", no_effect="layers return what the model's own return")
    training_mp_size: Int = key(
        1,
        "Model-parallel size of the training.",
        unit="ranks",
        above=0,
        no_effect="checkpoints record how they are cut",
    )
    injection_policy: dict[Any, Any] | None = key(
        None, "By class of a block, the ends of the names of its row-parallel layers.", aliases=("injection_dict",)
    )
    injection_policy_tuple: TextList | None = key(None, "Ends of the names of the row-parallel layers.")
    config: Any = key(
        None, "The model's configuration.", aliases=("args",), no_effect="the model has its configuration"
    )
    max_out_tokens: Int = key(
        1024,
        "Longest prompt that generate takes, where the key is given.",
        unit="tokens",
        above=0,
        aliases=("max_tokens",),
    )
    min_out_tokens: Int = key(
        1,
        "Minimum length of the KV cache.",
        unit="tokens",
        above=0,
        aliases=("min_tokens",),
        no_effect="caches are the model's own",
    )
    transposed_mode: Bool = key(False, "Weights are stored transposed.", no_effect="weights are the model's own")
    replace_method: str = key("auto", "From early releases.", own_auto=True, no_effect="there is one method")
    mp_size: Int | None = key(None, "Old name of tensor_parallel.tp_size.", unit="ranks", above=0)
    mpu: Any = key(None, "Old name of tensor_parallel.mpu.")
    ep_size: Int | None = key(None, "Old name of moe.ep_size.", unit="ranks", above=0)
    ep_group: Any = key(None, "Old name of moe.ep_group.")
    ep_mp_group: Any = key(None, "Old name of moe.ep_mp_group.")
    moe_experts: IntList | None = key(None, "Old name of moe.num_experts.", above=0)
    moe_type: Annotated[Literal["standard", "residual"] | None, AnyCase] = key(None, "Old name of moe.type.")


class HybridEngine(Section):
    """An engine that trains and generates, for reinforcement learning."""

    _feature: ClassVar[str] = "deepspeed.engine.generation"

    enabled: Bool = key(False, "Build the hybrid engine.")
    max_out_tokens: Int = key(
        512,
        "Length of the KV cache.",
        unit="tokens",
        above=0,
        no_effect="the model's own cache grows as far as generate asks",
    )
    inference_tp_size: Int = key(
        1,
        "Tensor-parallel degree while generating: 1, as layers are cut for training and generating alike.",
        unit="ranks",
        above=0,
    )
    release_inference_cache: Bool = key(
        False, "Free the KV cache after generating.", no_effect="the model's own cache ends with generate"
    )
    pin_parameters: Bool = key(
        True, "At stage 3: gather all parameters while text is generated. false: layer by layer, for every token."
    )
    tp_gather_partition_size: Int = key(
        8, "Layers gathered at once.", unit="layers", above=0, no_effect="parameters are gathered by buckets"
    )
    enable_cuda_graph: Bool = key(
        False,
        "Generate through CUDA graphs.",
        no_effect="the model's own generate runs; compile it with cache_implementation='static'",
    )
