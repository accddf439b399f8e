"""Hybrid models on shared sequences: layers that pass states along tokens compute what they compute on one rank."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

import deepspeed
from deepspeed.parallel.sequence.recurrent import mixers_of
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from deepspeed.sequence import mean_loss
from tests.ecosystem.support import needs_transformers
from tests.harness import on_ranks, run_ranks
from tests.parallel.sequence.llama import llama, packed_batch, padded_batch, plain_batch
from tests.parallel.sequence.net import cut

pytestmark = needs_transformers

_DELTA = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 4, "linear_value_head_dim": 4,
    "linear_conv_kernel_dim": 3, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
_MAMBA = {
    "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_n_groups": 1, "mamba_d_conv": 3,
    "mamba_expand": 2, "mamba_chunk_size": 8,
}  # fmt: skip
_EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8,
}  # fmt: skip
_LATENT = {
    "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "n_group": 1, "topk_group": 1,
    "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4,
    "layer_types": ["linear_attention", "full_attention"], "key_heads": 4,
}  # fmt: skip
_CONV = {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3}
PASSING: dict[str, dict[str, Any]] = {  # states go from rank to rank
    "Qwen3Next": {**_DELTA, **_EXPERTS, "decoder_sparse_step": 1},
    "Qwen3_5Text": _DELTA,
    "Qwen3_5MoeText": {**_DELTA, **_EXPERTS},
    "OlmoHybrid": _DELTA,
    "Bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "FalconH1": {**_MAMBA, "mamba_d_ssm": 32},
    "GraniteMoeHybrid": {
        **_MAMBA, "layer_types": ["mamba", "attention"], "num_local_experts": 4, "shared_intermediate_size": 16,
    },
    "NemotronH": {
        "layers_block_type": ["mamba", "attention"], "mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 4,
        "n_groups": 2, "conv_kernel": 3, "chunk_size": 8,
    },
    "Zamba2": {
        "mamba_d_state": 4, "mamba_d_conv": 3, "mamba_expand": 2, "mamba_ngroups": 1, "n_mamba_heads": 4,
        "mamba_headdim": 8, "chunk_size": 8, "num_mem_blocks": 1, "layers_block_type": ["mamba", "hybrid"],
        "hybrid_layer_ids": [1], "use_mem_rope": True, "adapter_rank": 4,
    },
    "Lfm2": _CONV,
    "Lfm2Moe": {**_CONV, **_EXPERTS, "num_dense_layers": 1},
    "Lfm3": _CONV,
    "KimiLinear": {**_LATENT, "linear_head_dim": 4, "linear_num_heads": 4, "linear_conv_kernel_dim": 3},
    "BailingHybrid": {**_LATENT, "short_conv_kernel_size": 3},
}  # fmt: skip
WHOLE: dict[str, dict[str, Any]] = {  # every rank computes the whole layer
    "MiniMax": {
        "layer_types": ["linear_attention", "full_attention"], "block_size": 8, "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "Jamba": {
        "mamba_d_state": 4, "mamba_d_conv": 3, "mamba_expand": 2, "mamba_dt_rank": 4, "attn_layer_period": 2,
        "attn_layer_offset": 1, "num_experts": 2, "expert_layer_period": 2, "expert_layer_offset": 1,
    },
    "RecurrentGemma": {
        "lru_width": 16, "block_types": ("recurrent", "attention"), "attention_window_size": 32, "conv1d_width": 3,
    },
}  # fmt: skip
FAMILIES = {**PASSING, **WHOLE}
BATCHES = {
    "plain": plain_batch,
    "packed": packed_batch,
    "padded": padded_batch,
    "padded on the left": lambda sample: padded_batch(sample, left=True),
}


def _losses(model, inputs):
    given = {name: value for name, value in inputs.items() if name != "shift_labels"}
    logits = model(**given, use_cache=False).logits
    return functional.cross_entropy(logits.flatten(0, 1), inputs["shift_labels"].flatten(), reduction="none")


def _documents_alone(model, whole):
    """Returns the losses of a packed batch, each document computed by itself."""
    rows = []
    for row in range(whole["input_ids"].size(0)):
        starts = (whole["position_ids"][row] == 0).nonzero().flatten().tolist()
        for start, stop in zip(starts, [*starts[1:], None], strict=True):
            rows.append(_losses(model, {name: value[row : row + 1, start:stop] for name, value in whole.items()}))
    return torch.cat(rows)


def _same(cells, checkpointing=False):
    rank, size = dist.get_rank(), dist.get_world_size()
    for family, batch_name in cells:
        whole = BATCHES[batch_name](3)
        expected, model = (llama(kind=family, **FAMILIES[family]).train() for _ in range(2))
        labels = whole["shift_labels"]
        losses = (_documents_alone if batch_name == "packed" else _losses)(expected, whole)
        (losses.sum() / (labels != -100).sum()).backward()
        mixers = mixers_of(model)
        UlyssesSPAttentionHF.register_with_transformers(model, sequence_parallel_size=size)
        assert all(mixer.continues_states == (family in PASSING) for mixer in mixers)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": batch_name == "packed"})
        mine = cut(whole, rank, size)
        found = _losses(model, mine)
        shown = cut({"losses": losses.detach().view(2, -1)}, rank, size)["losses"].flatten()
        what = f"{family}, {batch_name}"
        counted = mine["shift_labels"].flatten() != -100
        torch.testing.assert_close(found.detach()[counted], shown[counted], rtol=1e-5, atol=1e-5, msg=what)
        mean_loss(found, mine["shift_labels"]).backward()
        limit = 1e-4 if "linear_num_value_heads" in FAMILIES[family] else 1e-5
        for (name, parameter), wanted in zip(model.named_parameters(), expected.parameters(), strict=True):
            assert (parameter.grad is None) == (wanted.grad is None), (what, name)
            if wanted.grad is None:
                continue
            gradient = parameter.grad.clone()
            dist.all_reduce(gradient)
            difference = (gradient / size - wanted.grad).abs().max() / wanted.grad.abs().max().clamp(min=1e-6)
            assert difference < limit, (what, name, difference)


def test_one_family_of_each_kind_of_layers() -> None:
    cells = [("Qwen3_5Text", batch) for batch in BATCHES]
    cells += [("KimiLinear", "plain"), ("Bamba", "padded"), ("Zamba2", "plain"), ("Lfm2", "packed")]
    cells += [("MiniMax", "plain"), ("Jamba", "padded on the left"), ("RecurrentGemma", "packed")]
    run_ranks(_same, 2, cells)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_batch_of_every_family(ranks) -> None:
    run_ranks(_same, ranks, [(family, batch) for family in FAMILIES for batch in BATCHES], timeout=600)


@on_ranks(4)
def test_four_ranks_and_recomputation() -> None:
    _same([("Qwen3_5Text", "plain"), ("Lfm2", "padded"), ("Zamba2", "packed")], checkpointing=True)
    _same([("Bamba", "plain"), ("Jamba", "padded on the left")])


@on_ranks(4)
def test_by_configuration_alone() -> None:
    rank = dist.get_rank()
    for family, stage, batch, checkpointing in (
        ("Qwen3_5Text", 3, "plain", True),
        ("Bamba", 3, "packed", False),
        ("GraniteMoeHybrid", 1, "plain", False),
    ):
        whole, size = BATCHES[batch](3), 2
        expected, model = (llama(kind=family, **FAMILIES[family]).train() for _ in range(2))
        losses = (_documents_alone if batch == "packed" else _losses)(expected, whole)
        (losses.sum() / (whole["shift_labels"] != -100).sum()).backward()
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_clipping": 0.0,
            "sequence_parallel_size": size,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        }
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
        mine = cut(whole, rank % size, size)
        for _ in range(3):  # orders of gathers are followed from the second step on
            engine.backward(mean_loss(_losses(engine, mine), mine["shift_labels"]))
            found = dict(engine.iter_full("grad"))
            engine.step()
        for name, parameter in expected.named_parameters():
            difference = (found[name] - parameter.grad).abs().max() / parameter.grad.abs().max()
            assert difference < 1e-4, (family, stage, name, difference)
        engine.destroy()
