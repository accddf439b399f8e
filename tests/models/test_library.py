"""What is asked of the library: building, files, checkpointed layers, loss; and how it is without the library."""

from __future__ import annotations

import builtins

import pytest
import torch
from torch import nn

from deepspeed.models import building, checkpointing, construction, head, layers, stored, tensor_plan
from deepspeed.models.attention_modules import AttentionHeads, attention_of, change_heads
from tests.models.families import FAMILIES, family

transformers = pytest.importorskip("transformers")


def test_without_the_library(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.partition(".")[0] == "transformers":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    assert not building.has_library()
    assert stored.stored_tensors_of(nn.Linear(1, 1)) is None
    assert checkpointing.switch_of(nn.Linear(1, 1), "enable") is None


def test_models_are_built():
    config = building.described_configuration("llama", **FAMILIES["llama"])
    assert building.is_configuration(config) and not building.is_configuration({})
    with pytest.raises(ValueError):
        building.described_configuration("no_such_family")
    made = building.build_without_values(config, dtype=torch.bfloat16)
    assert made.lm_head.weight.is_meta and made.dtype == torch.bfloat16
    kind = building.class_named("LlamaForSequenceClassification")
    assert type(building.build_without_values(config, kind)) is kind
    assert type(building.build_without_values(config, transformers.AutoModel)).__name__ == "LlamaModel"
    assert building.class_named("NoSuchModel") is None and building.library_version() == transformers.__version__


def test_tensors_in_files_get_their_places():
    places = stored.StoredTensors(family("mixtral"))
    name, pattern = places.target("model.layers.0.block_sparse_moe.experts.1.w1.weight")
    assert name == "model.layers.0.mlp.experts.gate_up_proj" and pattern is not None
    assert hasattr(places.conversion("any", name, pattern), "add_tensor")
    assert places.target("lm_head.weight") == ("lm_head.weight", None)
    assert places.target("no.such.weight") is None
    assert sorted(["a.10", "a.2"], key=places.order) == ["a.2", "a.10"]
    operations = [type(one).__name__ for rule in places.rules for one in getattr(rule, "operations", None) or ()]
    assert "MergeModulelist" in operations


@pytest.mark.filterwarnings("error::FutureWarning")  # names that the next version has, too
def test_layers_are_checkpointed():
    model = family("llama")
    assert checkpointing.checkpoint_layers(model) and checkpointing.checkpoint_layers(model)
    seen = []
    checkpointing.replace_checkpoint_functions(model, lambda one: seen.append(one) or one)
    assert len(seen) >= 2
    assert not checkpointing.checkpoint_layers(nn.Linear(1, 1))
    switch = checkpointing.switch_of(model, "disable")
    assert switch is not None
    switch()
    assert not model.model.layers[0].gradient_checkpointing


def _own_losses(model):
    def losses_of(hidden, labels):
        logits = model.get_output_embeddings()(hidden)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")

    return losses_of


@pytest.mark.parametrize("name", ["llama", "qwen3", "mixtral", "opt", "gpt_neox", "phi"])
def test_a_loss_of_hidden_states_is_the_models_own(name):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(name, **FAMILIES[name]))
    tokens = torch.arange(12).view(2, 6)
    labels = tokens.masked_fill(tokens % 5 == 0, head.IGNORED)
    model.eval()
    assert head.has_plain_head(model) and head.changes_behind_head(model.config) == []
    expected = model(input_ids=tokens, labels=labels).loss
    found = head.forward_by_losses(model, _own_losses(model), input_ids=tokens, labels=labels)
    torch.testing.assert_close(found.loss, expected)
    assert found.logits is None
    whole = head.forward_by_losses(
        model, _own_losses(model), input_ids=tokens, labels=labels, num_items_in_batch=3, return_dict=False
    )
    torch.testing.assert_close(whole[0] * 3, model(input_ids=tokens, labels=labels, num_items_in_batch=3).loss * 3)


def test_heads_that_are_not_plain():
    assert not head.has_plain_head(family("gpt2")) and not head.has_plain_head(nn.Linear(1, 1))
    assert head.changes_behind_head(family("gemma2").config) == ["final_logit_softcapping"]
    assert head.changes_behind_head(family("mixtral", output_router_logits=True).config) == ["output_router_logits"]
    assert head.takes_loss_function(family("llama")) and not head.takes_loss_function(nn.Linear(1, 1))


def test_layers_of_the_library_are_known():
    conv = transformers.pytorch_utils.Conv1D
    assert layers.is_conv1d(conv) and layers.is_of_library(conv) and not layers.is_conv1d(nn.Linear)
    assert layers.initializer_of(family("llama")) is not None and layers.initializer_of(nn.Linear(1, 1)) is None


def test_tensor_parallel_plans():
    name, plan = next(tensor_plan.plans_in(family("llama")))
    assert name == "" and plan["model.layers.*.self_attn.q_proj"] == "colwise"
    ((name, _),) = tensor_plan.plans_in(nn.ModuleDict({"own": family("llama")}))
    assert name == "own" and list(tensor_plan.plans_in(nn.Linear(1, 1))) == []


def test_heads_of_attention_modules():
    attention = family("llama").model.layers[0].self_attn
    whole = attention_of(attention, attention.config)
    assert whole == AttentionHeads(4, 2, 4)
    assert change_heads(attention, whole, 2, 1) == {} and attention.num_key_value_groups == 2
    old = family("gptj").transformer.h[0].attn
    changed = change_heads(old, attention_of(old, None), 2, 2)
    assert changed["num_attention_heads"] == (4, 2) and old.embed_dim == 8
    assert attention_of(nn.Linear(1, 1), None) is None


def test_the_library_still_has_what_zero_init_wraps():
    """The names that ``construction`` patches: without them it would do nothing, in silence."""
    from transformers import initialization, modeling_utils
    from transformers.integrations import deepspeed as integration

    assert hasattr(modeling_utils, "_is_ds_init_called")
    assert hasattr(modeling_utils.PreTrainedModel, "initialize_weights")
    assert hasattr(integration, "initialize_weights_zero3") and hasattr(integration, construction._STAGE_3)
    assert initialization.TORCH_INIT_FUNCTIONS["normal_"] is construction.recorded_initializer("normal_")
    assert not construction.is_building() and not construction.is_building_from_config()
    before = getattr(integration, construction._STAGE_3)
    with construction.hide_stage_3():
        assert getattr(integration, construction._STAGE_3) is None
    assert getattr(integration, construction._STAGE_3) is before


def test_stacked_experts():
    from deepspeed.models.stacked_experts import lacks, parts_of, routes_in, stacked_weights, takes_all

    rows = {"gate_up_proj": 4, "down_proj": 4}
    experts = family("mixtral").model.layers[0].mlp.experts
    assert [weight.dim() for weight in stacked_weights(experts).values()] == [3, 3]
    assert lacks(experts, rows) is None and not takes_all(experts) and lacks(nn.Linear(1, 1), {}) is not None
    parts = parts_of(experts)
    assert parts.up is experts.gate_up_proj and parts.down is experts.down_proj and parts.after is None
    assert parts.up_bias is None and not parts.is_transposed
    wide = torch.randn(3, 48)
    torch.testing.assert_close(parts.between(wide), nn.functional.silu(wide[:, :24]) * wide[:, 24:])
    biased = parts_of(family("gpt_oss").model.layers[0].mlp.experts)
    assert biased.is_transposed and biased.up_bias is not None and biased.down_bias is not None
    first, second = torch.zeros(1), torch.ones(1)
    assert routes_in(first, second, {}) == (first, second)
    assert routes_in(None, None, {"router_indices": first, "routing_weights": second}) == (first, second)


class _UndeclaredExperts(nn.Module):
    """Routed experts of a class that does not declare how it computes; routes beyond them give ``beyond`` tokens."""

    def __init__(self, is_swapped: bool = False, beyond: float = 0.0) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Parameter(torch.zeros(6, 8, 5)), nn.Parameter(torch.zeros(4, 5, 4))
        self.act_fn, self.is_swapped, self.beyond = nn.SiLU(), is_swapped, beyond

    def forward(self, tokens, chosen, weights):
        made = []
        for token, experts, shares in zip(tokens, chosen, weights, strict=True):
            for expert, share in zip(experts.tolist(), shares, strict=True):
                if expert >= len(self.down_proj):
                    made.append(share * self.beyond * token)
                    continue
                gate, up = (self.gate_up_proj[expert] @ token).chunk(2)
                gate, up = (up, gate) if self.is_swapped else (gate, up)
                made.append(share * self.down_proj[expert] @ (self.act_fn(gate) * up))
        return torch.stack(made).view(len(tokens), -1, tokens.shape[1]).sum(1)


def test_undeclared_experts_are_run_to_see_what_they_compute():
    from deepspeed.models.stacked_experts import lacks, returns_tokens

    rows = {"gate_up_proj": 6, "down_proj": 4}
    for beyond, wanted in ((0.0, False), (1.0, True)):
        experts = _UndeclaredExperts(beyond=beyond)
        assert lacks(experts, rows) is None and returns_tokens(experts, rows) is wanted
    for other in (_UndeclaredExperts(is_swapped=True), _UndeclaredExperts(beyond=0.5)):
        assert "use_experts_implementation" in lacks(other, rows) and not returns_tokens(other, rows)
    assert lacks(_UndeclaredExperts(), {"up_proj": 4, "down_proj": 4}) is not None


def test_sizes_that_differ_from_layer_to_layer_are_none():
    from deepspeed.models import configurations

    config = transformers.LlamaConfig(num_hidden_layers=2, num_attention_heads=4, head_dim=8, num_key_value_heads=2)
    if not hasattr(config, "per_layer_config"):
        pytest.skip("this release of the library has one configuration for all layers")
    sizes = (configurations.heads_of, configurations.kv_heads_of)
    assert [size(config) for size in sizes] == [4, 2]
    config.per_layer_config = {1: {"num_key_value_heads": 4}}
    assert [size(config) for size in sizes] == [4, None]


def test_small_inputs():
    from deepspeed.models import inputs

    made = inputs.small_inputs(family("llama", pad_token_id=3), 2, 8)
    assert made is not None and made["input_ids"].shape == (2, 8) and inputs.small_inputs(nn.Linear(1, 1), 2, 8) is None
    assert made["use_cache"] is False  # Lfm3 and others cannot make a cache where no layer has attention
    assert inputs.main_input_of(nn.Linear(1, 1), "input_ids") == "input_ids"
    vision = transformers.ViTConfig(image_size=8, num_channels=1)
    assert inputs.image_shape_of(vision) == (1, 8, 8) and inputs.spectrum_shape_of(vision) is None
    sound = transformers.WhisperConfig(num_mel_bins=5, max_source_positions=4)
    assert inputs.spectrum_shape_of(sound) == (5, 8) and inputs.image_shape_of(sound) is None
