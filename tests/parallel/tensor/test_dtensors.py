"""Models that torch's ``parallelize_module`` or Transformers' ``tp_plan`` has cut are taken as they are."""

import time

import pytest
import torch
import torch.distributed as dist

import deepspeed
from deepspeed.comm.job.job import Job
from deepspeed.errors import CommunicationError, DeepSpeedConfigError, DivergenceError
from tests.ecosystem.support import needs_transformers
from tests.harness import on_ranks, run_ranks
from tests.harness.toy_models import causal_model
from tests.parallel.tensor.support import adamw, assert_weights_equal, config, llama, loss_of, plain_run

STEPS = 3
SIZES = {"vocab_size": 68, "intermediate_size": 36, "num_attention_heads": 6, "num_key_value_heads": 2}


def _parallelized(size: int):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size() // size, size), mesh_dim_names=("dp", "tp"))
    model = llama(**SIZES)
    plan = {"model.embed_tokens": RowwiseParallel(input_layouts=Replicate())}
    for number in range(2):
        layer = f"model.layers.{number}"
        plan |= {f"{layer}.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
        plan |= {f"{layer}.mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
        plan |= {f"{layer}.self_attn.o_proj": RowwiseParallel(), f"{layer}.mlp.down_proj": RowwiseParallel()}
    plan["lm_head"] = ColwiseParallel(output_layouts=Replicate())
    return parallelize_module(model, mesh["tp"], plan)


def _train(model, size: int, stage: int, expected, **arguments):
    rank, data = dist.get_rank(), dist.get_world_size() // size
    engine = deepspeed.initialize(
        model=model, optimizer=adamw(model.parameters()), config=config(0, stage), **arguments
    )[0]
    assert (engine.dp_world_size, engine.mp_world_size) == (data, size)
    for step, (loss, norm) in enumerate(zip(expected.losses, expected.norms, strict=True)):
        found = loss_of(engine, 10 * step, rank // size)
        engine.backward(found)
        engine.step()
        mean = found.detach().clone()
        dist.all_reduce(mean)
        assert mean.item() / dist.get_world_size() == pytest.approx(loss, rel=1e-5)
        assert engine.get_global_grad_norm() == pytest.approx(norm, rel=1e-5)
    full = engine._consolidated_16bit_state_dict()
    if full is not None:
        assert_weights_equal(full, expected.state)
    return engine


@pytest.mark.parametrize("stages", [(0, 3), pytest.param((1, 2), marks=pytest.mark.slow)])
@on_ranks(4)
def test_parallelize_module(stages: tuple[int, ...], tmp_path) -> None:
    size = 2
    folder = str(tmp_path)
    expected = plain_run(llama(**SIZES), STEPS, dist.get_world_size() // size)
    for stage in stages:
        model = _parallelized(size)
        engine = _train(model, size, stage, expected)
        if stage == 3:
            assert engine._runtime.buckets and not any(p.numel() for p in model.parameters())
        engine.save_checkpoint(folder, tag=f"stage{stage}")
        engine.destroy()
        again = deepspeed.initialize(model=llama(**SIZES), optimizer=adamw, config=config(size, 1))[0]
        again.load_checkpoint(folder, tag=f"stage{stage}")  # into a model that this package cuts
        assert again.global_steps == STEPS
        full = again._consolidated_16bit_state_dict()
        if full is not None:
            assert_weights_equal(full, expected.state)
        again.destroy()


class _Skips(torch.nn.Module):
    """One rank leaves a layer out, or ends where it should begin."""

    def __init__(self, layer, ends: bool):
        super().__init__()
        self.layer, self.ends = layer, ends

    def forward(self, hidden):
        if dist.get_rank() == 1 and self.ends:
            Job.adopt().watched.watch.post_exit_notice()  # as the end of a program does
            raise SystemExit
        return hidden if dist.get_rank() == 1 else self.layer(hidden)


def _parting(how: str):
    model = _parallelized(2)
    if how in ("skips a layer", "ends"):
        model.model.layers[1].mlp = _Skips(model.model.layers[1].mlp, how == "ends")
    engine = deepspeed.initialize(model=model, optimizer=adamw(model.parameters()), config=config(0, 1))[0]
    began = time.monotonic()
    try:
        loss = loss_of(engine, 0, 0)
        if how != "skips the backward" or dist.get_rank() == 0:
            engine.backward(loss)
        engine.step()
        loss_of(engine, 1, 0)
    except (CommunicationError, DivergenceError) as error:
        return type(error).__name__, str(error), time.monotonic() - began < 60
    except SystemExit:
        pass
    return "nothing", "", True


@pytest.mark.parametrize("how", ("skips a layer", "skips the backward", "ends"))
def test_a_rank_that_goes_another_way_is_named(how):
    """Torch's own collectives inside the layers wait without a limit, and nobody supervises them one by one."""
    first, second = run_ranks(_parting, 2, how)
    assert first[0] == ("CommunicationError" if how == "ends" else "DivergenceError") and first[2], (first, second)
    if how == "ends":
        assert "rank 1 has ended while this rank waits for the others at the layer 'model.layers.1.mlp." in first[1]
    else:
        assert first == second and "rank 0 waits for the others at " in first[1], (first, second)


def _qwen():
    """Query and key norms: whole, and fed by heads of this rank alone."""
    sizes = {"hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 2, "num_attention_heads": 6}
    more = {"num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 64, "attn_implementation": "eager"}
    model = causal_model("Qwen3", vocab_size=68, tie_word_embeddings=False, **sizes, **more)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.normal_(1.0, 0.1)
    return model


@needs_transformers
@on_ranks(2)
def test_a_plan_of_transformers(tmp_path) -> None:
    stages = (1, 3)
    folder = str(tmp_path)
    from transformers import AutoModelForCausalLM

    for made, place in ((llama(**SIZES), "llama"), (_qwen(), "qwen")):
        if dist.get_rank() == 0:
            made.save_pretrained(f"{folder}/{place}")
        dist.barrier()
        expected = plain_run(made, STEPS, 1)
        for stage in stages:
            model = AutoModelForCausalLM.from_pretrained(f"{folder}/{place}", tp_plan="auto")
            _train(model, 2, stage, expected).destroy()


def _sharded_by_transformers(folder, sizes):
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(**sizes))
    with pytest.raises(DeepSpeedConfigError) as refused:
        deepspeed.initialize(model=model, config=config(0, 0))
    return str(refused.value).splitlines()


@needs_transformers
def test_a_model_that_transformers_has_sharded_is_refused_with_the_lines_to_write(tmp_path):
    llama(**SIZES).save_pretrained(tmp_path)
    for ranks, kept in ((2, ""), (4, ", distributed_config=DistributedConfig(tp_size=2)")):
        sizes = {"fsdp_size": 2, "tp_size": ranks // 2}
        # fresh: torch's sharding propagation caches meshes of earlier runs, whose groups are gone, for equal ones
        for lines in run_ranks(_sharded_by_transformers, ranks, str(tmp_path), sizes, fresh=True):
            assert lines[0].startswith("the model was loaded with DistributedConfig(fsdp_size=2)")
            assert lines[1].strip() == f"model = LlamaForCausalLM.from_pretrained(folder{kept})"
            assert lines[2].strip() == 'config["zero_optimization"] = {"stage": 3}'
            assert "deepspeed.initialize(model=model, config=config)" in lines[3]


@on_ranks(2)
def test_what_cannot_be_taken_is_refused_before_anything_is_changed() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    with pytest.raises(DeepSpeedConfigError, match="was given to torch's fully_shard"):
        deepspeed.initialize(model=fully_shard(torch.nn.Linear(4, 4)), config=config(0, 0))
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = torch.nn.Linear(4, 4)
    model.weight = torch.nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Replicate(), Shard(0)]))
    with pytest.raises(DeepSpeedConfigError, match="expected one mesh of one axis, that of tensor parallelism"):
        deepspeed.initialize(model=model, config=config(0, 0))
    model.weight = torch.nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh["tp"], [Shard(0)]))
    with pytest.raises(DeepSpeedConfigError, match=r"is a DTensor over the ranks \[0, 1\], but the ranks that share"):
        deepspeed.initialize(model=model, config=config(0, 0), mesh_param=(2, 1))
    optimizer = adamw(model.parameters())
    model.weight.sum().backward()
    optimizer.step()
    with pytest.raises(DeepSpeedConfigError, match=r"initialize\(optimizer=<AdamW>\) has states of"):
        deepspeed.initialize(model=model, optimizer=optimizer, config=config(0, 0))
    model = llama()
    optimizer = adamw(model.parameters())
    loss_of(model, 0, 0).backward()
    optimizer.step()
    with pytest.raises(DeepSpeedConfigError, match=r"initialize\(optimizer=<AdamW>\) has states of"):
        deepspeed.initialize(model=model, optimizer=optimizer, config=config(2, 0))
    assert model.lm_head.weight.shape[0] == 67
