"""The other methods of peft that look into sharded parameters: initializers, prompts, importance from gradients."""

import pytest
import torch
import torch.distributed as dist

from tests.ecosystem.support import forget_runs, needs_transformers, on_cpu_ranks
from tests.ecosystem.transformers import runs
from tests.harness import on_ranks
from tests.zero.construction.pretrained import tokens

pytestmark = needs_transformers

PROJECTIONS = ["q_proj", "v_proj"]
LORA = {"target_modules": PROJECTIONS, "r": 4, "lora_alpha": 8, "lora_dropout": 0.0}

METHODS = {
    "dora": ("LoraConfig", {**LORA, "use_dora": True}),
    "rslora": ("LoraConfig", {**LORA, "use_rslora": True}),
    "embeddings": ("LoraConfig", {**LORA, "target_modules": [*PROJECTIONS, "embed_tokens", "lm_head"]}),
    "biases": ("LoraConfig", {**LORA, "bias": "all"}),
    "pissa": ("LoraConfig", {**LORA, "init_lora_weights": "pissa"}),
    "olora": ("LoraConfig", {**LORA, "init_lora_weights": "olora"}),
    "ia3": ("IA3Config", {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
    "prompt": ("PromptTuningConfig", {"num_virtual_tokens": 3}),
    "prefix": ("PrefixTuningConfig", {"num_virtual_tokens": 3}),
    "adalora": (
        "AdaLoraConfig",
        {
            "target_modules": PROJECTIONS, "init_r": 4, "target_r": 2, "tinit": 1, "tfinal": 1, "deltaT": 1,
            "total_step": 6, "lora_dropout": 0.0,
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [n if n in ("dora", "prompt") else pytest.param(n, marks=pytest.mark.slow) for n in METHODS]
)
@on_ranks(2)
@on_cpu_ranks
def test_method_under_stage_3(name, tmp_path) -> None:
    folder = str(tmp_path)
    import peft
    from accelerate import Accelerator, DeepSpeedPlugin

    rank, ranks = dist.get_rank(), dist.get_world_size()
    place = runs.save_pretrained(folder)
    kind, arguments = METHODS[name]

    def adapt(model):
        torch.manual_seed(7)
        return peft.get_peft_model(model, getattr(peft, kind)(task_type="CAUSAL_LM", **arguments))

    def make_optimizer(model):
        return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02)

    plain = adapt(runs.new_model(place))
    optimizer = make_optimizer(plain)
    expected = [[] for _ in range(ranks)]
    for step in range(4):
        for number in range(ranks):
            batch = tokens(number + 10 * step)
            loss = plain(input_ids=batch, labels=batch).loss
            (loss / ranks).backward()
            expected[number].append(loss.item())
        if name == "adalora":
            plain.base_model.update_and_allocate(step)
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    plugin = DeepSpeedPlugin(zero_stage=3, zero3_save_16bit_model=True, gradient_clipping=1.0)
    # The base is sharded; what is trained is small enough to stay whole, as it is with the default of that key.
    plugin.deepspeed_config["zero_optimization"]["stage3_param_persistence_threshold"] = 600
    accelerator = Accelerator(deepspeed_plugin=plugin)
    plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 2
    model = adapt(runs.new_model(place))
    engine, _ = accelerator.prepare(model, make_optimizer(model))
    found = []
    engine.train()
    for step in range(4):
        batch = tokens(rank + 10 * step)
        loss = engine(input_ids=batch, labels=batch).loss
        if name == "adalora":
            # Importance needs the gradients, which accelerate's backward has spent: so as peft's own loop does it.
            engine.backward(loss)
            model.base_model.update_and_allocate(step)
            engine.step()
        else:
            accelerator.backward(loss)
        found.append(loss.item())
    if name != "adalora":  # its importance is a product of tiny numbers, in whose order rounding decides
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected[rank]), rtol=1e-3, atol=1e-3)
    state = accelerator.get_state_dict(engine)
    if rank == 0:
        adapter = peft.get_peft_model_state_dict(model, state_dict=state)
        reference = peft.get_peft_model_state_dict(plain)
        shapes, expected_shapes = ({key: value.shape for key, value in d.items()} for d in (adapter, reference))
        assert shapes.keys() == expected_shapes.keys()
        # What AdaLoRA leaves of each matrix depends on its importance; all that was asked for is dealt out.
        assert name == "adalora" or shapes == expected_shapes
        assert sum(map(torch.Size.numel, shapes.values())) > 0
    forget_runs()
