"""verl's engine: registered under verl's names, updates as plain torch, and its weights, phases and files."""

import sys
import types

import pytest
import torch
import torch.distributed as dist

from deepspeed.errors import DeepSpeedConfigError
from tests.ecosystem.support import needs_transformers
from tests.harness import on_ranks
from tests.harness.toy_models import causal_model

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 32}
LR = 0.01


class BaseEngine:
    """verl's, without its methods, all of which an engine must have."""


class EngineRegistry:
    engines = {}

    @classmethod
    def register(cls, model_type, backend, device="cuda"):
        def decorate(engine):
            assert issubclass(engine, BaseEngine)
            for each in device:
                cls.engines[model_type, backend, each] = engine
            return engine

        return decorate


def _stand_in():
    for name in ("verl", "verl.workers", "verl.workers.engine"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["verl.workers.engine"].BaseEngine = BaseEngine
    sys.modules["verl.workers.engine"].EngineRegistry = EngineRegistry


def _engine(model, more=(), **engine_config):
    from deepspeed.integrations.verl import DeepSpeedEngine

    assert EngineRegistry.engines["language_model", "deepspeed", "cpu"] is DeepSpeedEngine
    optimizer = types.SimpleNamespace(
        lr=LR, betas=(0.9, 0.99), weight_decay=0.0, clip_grad=1.0, total_training_steps=8, lr_scheduler_type="cosine"
    )
    engine = DeepSpeedEngine(
        model_config=types.SimpleNamespace(module=model, **dict(more)),
        engine_config={"dtype": "float32", **engine_config},
        optimizer_config=optimizer,
        checkpoint_config=None,
    )
    engine.initialize()
    return engine


def _batch(rank, jagged=False):
    torch.manual_seed(rank)
    lengths = [5, 8, 3, 6]
    rows = [torch.randint(1, 32, (length,)) for length in lengths]
    if jagged:
        mask = [torch.arange(length) < length - 1 for length in lengths]
        data = {"input_ids": rows, "loss_mask": mask}
        return {name: torch.nested.as_nested_tensor(value, layout=torch.jagged) for name, value in data.items()}
    ids, mask = torch.zeros(4, 8, dtype=torch.long), torch.zeros(4, 8, dtype=torch.long)
    for row, values in enumerate(rows):
        ids[row, : len(values)], mask[row, : len(values)] = values, 1
    return {"input_ids": ids, "attention_mask": mask, "loss_mask": torch.nn.functional.pad(mask[:, 1:], (0, 1))}


def _loss(model_output, data, dp_group):
    values, mask = model_output["log_probs"], data["loss_mask"]
    if values.is_nested:
        values, mask = values.values(), mask.values()
    loss = -(values * mask).sum() / data["batch_num_tokens"] * data["dp_size"]
    return loss, {"loss": loss.item()}


def _plain_loss(model, data):
    logits = model(input_ids=data["input_ids"], attention_mask=data["attention_mask"]).logits.float()
    values = logits.log_softmax(-1)[:, :-1].gather(-1, data["input_ids"][:, 1:, None])[..., 0]
    return -(values * data["loss_mask"][:, :-1]).sum()


@needs_transformers
@on_ranks(2)
def test_updates_phases_and_files(tmp_path, rank):
    _stand_in()
    engine = _engine(causal_model(seed=1, **SIZES), param_offload=True)
    plain = causal_model(seed=1, **SIZES)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=LR, betas=(0.9, 0.99), weight_decay=0.0)
    for jagged in (False, True):
        with engine.train_mode():
            assert engine.mode == "train" and engine.module.training
            data = {**_batch(rank, jagged), "micro_batch_size_per_gpu": 3, "calculate_entropy": True}
            found = engine.forward_backward_batch(data, _loss)
            norm = engine.optimizer_step()
            rate = engine.lr_scheduler_step()
        batches = [_batch(each) for each in range(2)]
        tokens = sum(int(each["loss_mask"].sum()) for each in batches)
        sum(_plain_loss(plain, each) / tokens for each in batches).backward()
        expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        assert norm == pytest.approx(float(expected), rel=1e-4)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = rate
        assert len(found["loss"]) == 2 and len(found["metrics"]["loss"]) == 2
        assert found["model_output"]["entropy"].is_nested == jagged
    assert rate < LR and engine.mode is None
    generator, peft_config = engine.get_per_tensor_param()
    weights = dict(generator)
    assert peft_config is None and (engine.get_data_parallel_rank(), engine.get_data_parallel_size()) == (rank, 2)
    for name, value in plain.named_parameters():
        torch.testing.assert_close(weights[name], value.detach(), rtol=1e-4, atol=1e-5)
    for step in range(3):
        engine.save_checkpoint(str(tmp_path), global_step=step, max_ckpt_to_keep=2)
    dist.barrier()
    assert sorted(path.name for path in tmp_path.glob("global_step_*")) == ["global_step_1", "global_step_2"]
    with engine.eval_mode(), torch.no_grad():
        before = engine.forward_backward_batch(_batch(rank), None, forward_only=True)["model_output"]["log_probs"]
    with engine.train_mode():
        engine.forward_backward_batch(_batch(rank), _loss)
        engine.optimizer_step()
    engine.load_checkpoint(str(tmp_path))
    with engine.eval_mode():
        after = engine.forward_backward_batch(_batch(rank), None, forward_only=True)["model_output"]["log_probs"]
    assert torch.equal(before, after) and engine.is_mp_src_rank_with_outputs()
    for wrong in (lambda: engine.to("tpu"), lambda: engine.save_checkpoint(str(tmp_path), hdfs_path="hdfs://a")):
        with pytest.raises(DeepSpeedConfigError, match="expected"):
            wrong()
    engine.to("cpu")
    engine.module.destroy()


@needs_transformers
@on_ranks(2)
def test_adapters(rank):
    pytest.importorskip("peft")
    _stand_in()
    how = {"lora_rank": 4, "target_modules": ["q_proj"]}
    engine = _engine(causal_model(seed=1, **SIZES), how, zero_stage=2)
    plain = causal_model(seed=1, **SIZES)
    with engine.train_mode():
        engine.forward_backward_batch(_batch(rank), _loss)
        engine.optimizer_step()
    weights, peft_config = engine.get_per_tensor_param()
    weights = dict(weights)
    assert peft_config["r"] == 4 and set(weights) == {name for name, _ in plain.named_parameters()}
    adapters, _ = engine.get_per_tensor_param(base_sync_done=True)
    assert len(dict(adapters)) == 4
    with engine.eval_mode(), engine.disable_adapter(), torch.no_grad():
        data = _batch(rank)
        logits = engine.module(input_ids=data["input_ids"], attention_mask=data["attention_mask"]).logits
        torch.testing.assert_close(
            logits, plain(input_ids=data["input_ids"], attention_mask=data["attention_mask"]).logits
        )
    engine.module.destroy()
