"""``expert_parallel``: AutoEP."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from deepspeed.config.section import Section, key
from deepspeed.config.types import AnyCase, Bool, Float, FloatOrAuto, Int, IntOrAuto

_READ = "the structure is read from the model"
_ROUTER = "the model's own router is used unchanged"
_ONE_WAY = "there is one implementation"


class ExpertParallel(Section):
    """Expert parallelism for models that were not written for it (AutoEP)."""

    _feature: ClassVar[str] = "deepspeed.parallel.expert.feature"

    enabled: Bool = key(False, "Spread the experts of the model over ranks.")
    autoep_size: Int = key(
        1,
        "Expert-parallel degree; must divide the number of experts and the number of data x sequence ranks.",
        unit="ranks",
        above=0,
    )
    expert_tensor_parallel_size: Int = key(
        1, "Tensor-parallel degree of experts; only 1 is supported.", unit="ranks", minimum=1, maximum=1
    )
    validate_folding_routing: Bool = key(
        False, "Check that tensor ranks route tokens in the same way.", no_effect=_ONE_WAY
    )
    preset_model: (
        Annotated[
            Literal["mixtral", "qwen3_moe", "qwen3_5_moe", "deepseek_v2", "deepseek_v3", "minimax_m3"],
            AnyCase,
        ]
        | None
    ) = key(None, "Checked against the model's type; the structure is read from the model. minimax_m3 since 0.19.8.")
    moe_layer_pattern: str | None = key(
        None, "Regular expression: experts are spread only in blocks whose name matches."
    )
    expert_pattern: str | None = key(None, "Regular expression: only modules whose last name matches are spread.")
    router_pattern: str | None = key(None, "Names of the routers.", no_effect=_READ)
    expert_w1: str | None = key(None, "Name of the first weight; not empty, without dots.", no_effect=_READ)
    expert_w2: str | None = key(None, "Name of the second weight; not empty, without dots.", no_effect=_READ)
    expert_w3: str | None = key(None, "Name of the third weight; null: there is none.", no_effect=_READ)
    num_experts_attr: str | None = key(None, "Attribute with the number of experts.", no_effect=_READ)
    top_k_attr: str | None = key(None, "Attribute with the experts per token.", no_effect=_READ)
    has_shared_experts: Bool | None = key(None, "Shared experts exist.", no_effect=_READ)
    shared_experts_pattern: str | None = key(None, "Names of shared experts.", no_effect=_READ)
    shared_experts_gate_pattern: str | None = key(None, "Names of their gates.", no_effect=_READ)
    use_grouped_mm: Bool = key(
        True, "Use grouped matrix products where they are faster: bf16, CUDA capability 9 and newer."
    )
    dispatch_dtype: Annotated[Literal["int8"], AnyCase] | None = key(
        None,
        "Dtype in which tokens are sent to experts and, in backward, the gradients of the experts' outputs. int8: with "
        "a scale per 128 elements.",
        null_means="the dtype of the tokens",
    )
    disable_triton_grouped_mm: Bool = key(False, "Do not use Triton.", no_effect=_ONE_WAY)
    top_k: IntOrAuto = key(
        "auto",
        "Experts per token.",
        own_auto=True,
        above=0,
        no_effect=_ROUTER,
    )
    score_func: Annotated[Literal["auto", "softmax", "sigmoid"], AnyCase] = key(
        "auto", "Score function of the router.", own_auto=True, no_effect=_ROUTER
    )
    score_apply: Annotated[Literal["auto", "pre", "post"], AnyCase] = key(
        "auto",
        "Apply the weight before or after the expert.",
        own_auto=True,
        no_effect=_ROUTER,
    )
    route_norm: Bool | None = key(None, "Normalize the router's weights.", no_effect=_ROUTER)
    route_scale: Float = key(1.0, "Scale of the router's weights.", minimum=0, no_effect=_ROUTER)
    routed_scaling_factor: FloatOrAuto = key(
        "auto",
        "Scale of the output of routed experts.",
        own_auto=True,
        minimum=0,
        no_effect=_ROUTER,
    )
    num_expert_groups: Int | None = key(None, "Groups of experts.", above=0, no_effect=_ROUTER)
    num_limited_groups: Int | None = key(
        None, "Number of expert groups that a token may use.", above=0, no_effect=_ROUTER
    )
    combine_impl: Annotated[Literal["auto", "weighted_sum", "legacy_bmm", "fused_weighted_sum"], AnyCase] = key(
        "auto",
        "How outputs are combined; fused_weighted_sum since 0.19.8.",
        own_auto=True,
        no_effect=_ONE_WAY,
    )
    load_balance_coeff: Float | None = key(
        None,
        "After each update the bias of every expert, which takes part in the choice of experts only, moves by this "
        "towards an even load: up where fewer tokens than on average chose it. Kept in the model's own "
        "e_score_correction_bias or expert_bias, else in a new buffer expert_bias of the router.",
        above=0,
        null_means="biases stay as they are",
    )
    async_split_plan: Bool = key(False, "Plan the splits during computation.", since="0.19.8", no_effect=_ONE_WAY)
    row_weighting_impl: Annotated[Literal["auto", "eager", "fused"], AnyCase] = key(
        "auto", "Kernel of the weighting.", since="0.19.8", own_auto=True, no_effect=_ONE_WAY
    )
    gate_up_impl: Annotated[Literal["separate", "fused"], AnyCase] = key(
        "separate", "Kernel of the gate.", since="0.19.8", no_effect=_ONE_WAY
    )
    comm_backend: Annotated[Literal["comm", "deepep"], AnyCase] = key(
        "comm", "Backend of the all-to-all. deepep is not supported yet.", since="0.19.8"
    )
    comm_num_sm: Int = key(12, "Multiprocessors for communication.", minimum=0, since="0.19.8", no_effect=_ONE_WAY)
    comm_qp_margin: Int = key(4, "Spare queue pairs.", minimum=0, since="0.19.8", no_effect=_ONE_WAY)
    comm_max_tokens_per_rank: Int = key(
        0, "Maximum number of tokens per rank; 0: measured.", minimum=0, since="0.19.8", no_effect=_ONE_WAY
    )
    expert_activation: str | None = key(
        None,
        "Activation of the experts: swiglu, geglu_tanh, swiglu_clamped, swiglu_oai, or a name given to "
        "deepspeed.moe.ep_experts.register_expert_activation.",
        since="0.19.8",
        null_means="the model's own",
    )
