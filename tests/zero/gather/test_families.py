"""transformers' families from small configs against plain torch: other stages and rank counts, recomputation, adapters,
generation, and policy, reference and reward models in one process.

Training from files at stage 3 on two ranks is in ``tests/zero/construction/test_model_files.py``.
"""

import pytest
import torch
import torch.distributed as dist

from tests.engine.support import engine_of
from tests.harness import on_ranks, run_ranks
from tests.harness.cases import LIMITS, STAGE_3, Case, Plain, check, seeded
from tests.zero.construction import pretrained as models

pytest.importorskip("transformers")

FAMILIES = ["gpt2", "llama", "t5", "vit", "mixtral"]


def _model(name, **more):
    import transformers

    transformers.utils.logging.set_verbosity_error()
    kinds = {"t5": transformers.T5ForConditionalGeneration, "vit": transformers.ViTForImageClassification}
    kind = kinds.get(name, transformers.AutoModelForCausalLM)
    config = getattr(models, f"{name}_config")(**more)
    model = kind(config) if name in kinds else kind.from_config(config)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model.train()


def _loss(name):
    def loss(model, step, of):
        number = of + 10 * step
        if name == "vit":
            generator = torch.Generator().manual_seed(number)
            return model(pixel_values=torch.randn(2, 3, 8, 8, generator=generator), labels=torch.tensor([0, 1])).loss
        length = 5 + (step + of) % 4  # changes from step to step and between ranks
        tokens = models.tokens(number, length=length)
        mask = torch.ones_like(tokens)
        mask[0, length - 2 :] = 0
        return model(input_ids=tokens, attention_mask=mask, labels=tokens).loss

    return loss


def _recompute(reentrant):
    def prepare(model):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        if reentrant:
            model.enable_input_require_grads()
        return model

    return prepare


TOLERANCE = {"rtol": 1e-3, "atol": 1e-4}  # AdamW divides tiny gradients by their own size
GROUPS = [(3, {**LIMITS["all sharded"], key: 2}) for key in ("zero_hpz_partition_size", "mics_shard_size")]


def _case(name, stages, **more):
    return Case(name, lambda: _model(name), _loss(name), steps=2, stages=stages, tolerance=TOLERANCE, **more)


def _train(names, stages, reentrant=None):
    for name in names:
        prepare = _recompute(reentrant) if reentrant is not None else lambda model: model
        check(_case(name, stages, prepare=prepare))


def test_every_family_on_three_ranks():
    run_ranks(_train, 3, FAMILIES, STAGE_3[:1], timeout=150)


def test_families_on_four_ranks_in_groups_of_two():
    run_ranks(_train, 4, ["llama", "mixtral"], GROUPS, timeout=150)


@pytest.mark.slow
def test_every_family_at_every_stage():
    for ranks in (2, 4):
        run_ranks(_train, ranks, FAMILIES, [(1, {}), (2, {}), *STAGE_3, *(GROUPS if ranks == 4 else [])], timeout=400)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation(reentrant):
    names = ["gpt2", "llama", "mixtral"] if reentrant else FAMILIES
    run_ranks(_train, 2, names, STAGE_3[:1], reentrant)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["before", "engine"])
@pytest.mark.parametrize("name", FAMILIES)
@on_ranks(2, timeout=300)
def test_compiled_as_a_whole(name, how):
    torch._dynamo.reset()
    more = {}
    if how == "before":
        more["prepare"] = lambda model: torch.compile(model, backend="aot_eager")
    else:
        more["ready"] = lambda engine: engine.compile(backend="aot_eager")
    check(_case(name, STAGE_3[:1], **more))


@on_ranks(2)
def test_adapters_train_as_without_sharding():
    pytest.importorskip("peft")
    import peft

    def make():
        base = _model("llama")
        return peft.get_peft_model(base, peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]))

    check(Case("adapters", make, _loss("llama"), tolerance=TOLERANCE, stages=[(1, {}), *STAGE_3]))


@on_ranks(2)
def test_generation_between_steps():
    """Greedy generation in the middle of training, with prompts of another length on each rank."""
    names = ["gpt2", "llama", "t5", "mixtral"]
    for name in names:
        plain, loss = Plain(lambda name=name: _model(name)), _loss(name)
        engine = engine_of(seeded(lambda name=name: _model(name)), 3, zero=LIMITS["all sharded"])
        for step in range(2):
            engine.backward(loss(engine, step, dist.get_rank()))
            engine.step()
            plain.step(lambda model, of, step=step, loss=loss: loss(model, step, of))
            prompt = models.tokens(5, batch=2, length=3)[:, : 2 + dist.get_rank()]
            settings = {"max_new_tokens": 2 + 2 * dist.get_rank(), "do_sample": False, "pad_token_id": 0}
            engine.eval()
            plain.model.eval()
            found = engine.module.generate(prompt, synced_gpus=True, **settings)
            assert torch.equal(found, plain.model.generate(prompt, **settings)), name
            engine.train()
            plain.model.train()
