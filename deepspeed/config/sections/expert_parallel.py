"""``expert_parallel``: AutoEP."""

from __future__ import annotations

from typing import Annotated, Literal

from deepspeed.config.section import Section, key
from deepspeed.config.types import AnyCase, Bool, Float, FloatOrAuto, Int, IntOrAuto


class ExpertParallel(Section):
    """Expert parallelism for models that were not written for it (AutoEP)."""

    enabled: Bool = key(False, "Replace mixture-of-experts layers by expert-parallel ones.")
    autoep_size: Int = key(1, "Degree; divides the ranks of a stage and the number of experts.", unit="ranks", above=0)
    expert_tensor_parallel_size: Int = key(1, "Only 1.", unit="ranks", minimum=1, maximum=1)
    validate_folding_routing: Bool = key(False, "Check that tensor ranks route alike.")
    preset_model: (
        Annotated[
            Literal["mixtral", "qwen3_moe", "qwen3_5_moe", "deepseek_v2", "deepseek_v3", "minimax_m3"],
            AnyCase,
        ]
        | None
    ) = key(None, "Ready structure; minimax_m3 since 0.19.8.")
    moe_layer_pattern: str | None = key(None, "Names of the layers.")
    expert_pattern: str | None = key(None, "Names of the experts.")
    router_pattern: str | None = key(None, "Names of the routers.")
    expert_w1: str | None = key(None, "Name of the first weight; not empty, without dots.")
    expert_w2: str | None = key(None, "Name of the second weight; not empty, without dots.")
    expert_w3: str | None = key(None, "Name of the third weight; null says there is none.")
    num_experts_attr: str | None = key(None, "Attribute with the number of experts.")
    top_k_attr: str | None = key(None, "Attribute with the experts per token.")
    has_shared_experts: Bool | None = key(None, "Shared experts exist.")
    shared_experts_pattern: str | None = key(None, "Names of shared experts.")
    shared_experts_gate_pattern: str | None = key(None, "Names of their gates.")
    use_grouped_mm: Bool = key(True, "Grouped matrix product.")
    disable_triton_grouped_mm: Bool = key(False, "Not by Triton.")
    top_k: IntOrAuto = key("auto", "Experts per token.", own_auto=True, above=0)
    score_func: Annotated[Literal["auto", "softmax", "sigmoid"], AnyCase] = key("auto", "Router.", own_auto=True)
    score_apply: Annotated[Literal["auto", "pre", "post"], AnyCase] = key(
        "auto", "Weigh before or after the expert.", own_auto=True
    )
    route_norm: Bool | None = key(None, "Normalise the weights.")
    route_scale: Float = key(1.0, "Scale of the weights.", minimum=0)
    routed_scaling_factor: FloatOrAuto = key("auto", "Scale of the routed part.", own_auto=True, minimum=0)
    num_expert_groups: Int | None = key(None, "Groups of experts.", above=0)
    num_limited_groups: Int | None = key(None, "Groups a token may use.", above=0)
    combine_impl: Annotated[Literal["auto", "weighted_sum", "legacy_bmm", "fused_weighted_sum"], AnyCase] = key(
        "auto", "Way of combining; fused_weighted_sum since 0.19.8.", own_auto=True
    )
    load_balance_coeff: None = key(None, "Only null.")
    async_split_plan: Bool = key(False, "Plan splits beside compute.", since="0.19.8")
    row_weighting_impl: Annotated[Literal["auto", "eager", "fused"], AnyCase] = key(
        "auto", "Kernel of the weighting.", since="0.19.8", own_auto=True
    )
    gate_up_impl: Annotated[Literal["separate", "fused"], AnyCase] = key(
        "separate", "Kernel of the gate.", since="0.19.8"
    )
    comm_backend: Annotated[Literal["comm", "deepep"], AnyCase] = key("comm", "All-to-all.", since="0.19.8")
    comm_num_sm: Int = key(12, "Multiprocessors for communication.", minimum=0, since="0.19.8")
    comm_qp_margin: Int = key(4, "Spare queue pairs.", minimum=0, since="0.19.8")
    comm_max_tokens_per_rank: Int = key(0, "Most tokens per rank; 0 is measured.", minimum=0, since="0.19.8")
    expert_activation: str | None = key(None, "Activation of the experts.", since="0.19.8")
