"""OpenRLHF's strategy: its methods on engines, with an actor of OpenRLHF's and with a plain model."""

import sys
import types

import pytest
import torch
import torch.distributed as dist
from torch import nn

from deepspeed.errors import CheckpointError, DeepSpeedConfigError
from deepspeed.integrations.openrlhf import Strategy
from tests.ecosystem.support import needs_transformers
from tests.harness import on_ranks
from tests.harness.toy_models import causal_model

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 32}


class Actor(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model


def _strategy(stage):
    sys.modules["openrlhf"] = types.ModuleType("openrlhf")
    sys.modules["openrlhf.models"] = types.ModuleType("openrlhf.models")
    sys.modules["openrlhf.models"].Actor = Actor
    args = types.SimpleNamespace(param_dtype="fp32")
    strategy = Strategy(
        max_norm=1.0, micro_train_batch_size=2, train_batch_size=8, zero_stage=stage, args=args
    )  # two micro-batches an update
    strategy.setup_distributed()
    return strategy


@needs_transformers
@on_ranks(2)
def test_training_averages_and_files(tmp_path, rank):
    strategy = _strategy(3)
    assert (strategy.world_size, strategy.accumulated_gradient, strategy.get_rank()) == (2, 2, rank)
    actor, reference = Actor(causal_model(seed=1, **SIZES)), causal_model(seed=1, **SIZES)
    optimizer = strategy.create_optimizer(actor, lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    (actor, optimizer, scheduler), reference, nothing = strategy.prepare(
        (actor, optimizer, scheduler), reference, (None, None, None), is_rlhf=True
    )
    assert isinstance(actor, Actor) and nothing == (None, None, None) and strategy.is_rlhf
    plain = causal_model(seed=1, **SIZES)
    decayed = [one for name, one in plain.named_parameters() if "norm" not in name]
    others = [one for name, one in plain.named_parameters() if "norm" in name]
    twin = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], 0.01)
    twin.param_groups[0]["betas"] = twin.param_groups[1]["betas"] = (0.9, 0.95)
    data = torch.randint(0, 32, (8, 6), generator=torch.Generator().manual_seed(5))
    loader = strategy.setup_dataloader(data, 2, shuffle=False)
    batches = list(loader)
    assert len(batches) == 2 and len(strategy.setup_dataloader(data, 2, shuffle=False, consumed_samples=4)) == 1
    for batch in batches:
        loss = actor.model(input_ids=batch, labels=batch).loss
        strategy.backward(loss, actor, optimizer)
        strategy.optimizer_step(optimizer, actor, scheduler)
        strategy.moving_average(actor, reference, beta=0.5)
    plain(input_ids=data, labels=data).loss.backward()
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    twin.step()
    assert strategy.all_reduce({"a": rank + 1.0}) == {"a": 1.5} and strategy.all_reduce(float(rank), "max") == 1.0
    assert strategy.all_gather(torch.tensor([rank])).tolist() == [0, 1]
    start = dict(causal_model(seed=1, **SIZES).named_parameters())
    weights = dict(actor.model.export_weights(ranks="all"))
    averages = dict(reference.export_weights(ranks="all"))
    for name, value in plain.named_parameters():
        torch.testing.assert_close(weights[name], value.detach(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(averages[name], (start[name].detach() + weights[name]) / 2, rtol=1e-5, atol=1e-6)
    strategy.save_model(actor, None, str(tmp_path / "model"))
    for tag in ("a", "b", "c"):
        strategy.save_ckpt(actor.model, str(tmp_path / "steps"), tag, max_num=2, client_state={"tag": tag})
    dist.barrier()
    assert len([one for one in (tmp_path / "steps").iterdir() if one.is_dir()]) == 2
    path, state = strategy.load_ckpt(actor.model, str(tmp_path / "steps"))
    assert path.endswith("c") and state["tag"] == "c"
    with pytest.raises(CheckpointError, match="found none"):
        strategy.load_ckpt(actor.model, str(tmp_path / "model"))
    if rank == 0:
        torch.save({"x." + name: value for name, value in start.items()}, tmp_path / "start.bin")
    dist.barrier()
    strategy.load_model(
        actor, str(tmp_path / "start.bin"), key_replace_fn=lambda found: {name[2:]: one for name, one in found.items()}
    )
    for name, value in actor.model.export_weights(ranks="all"):
        assert torch.equal(value, start[name])
    import transformers

    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    for name, value in saved.named_parameters():
        assert torch.equal(value, weights[name])
    for each in (actor.model, reference):
        each.destroy()


def test_rings_are_refused():
    with pytest.raises(DeepSpeedConfigError, match="ring_attn_size=2"):
        Strategy(args=types.SimpleNamespace(ring_attn_size=2))
