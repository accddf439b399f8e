"""What the ranks that share layers must have in common, and combinations with everything else that changes a step."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.activation_checkpointing import checkpointing
from deepspeed.errors import DeepSpeedConfigError, DivergenceError
from tests.harness import on_ranks, run_ranks
from tests.harness.training import train_like
from tests.parallel.tensor.support import adamw, assert_weights_equal, config, ids, llama, loss_of, plain_run


def _engine(model: nn.Module, size: int, stage: int, **sections):
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return deepspeed.initialize(model=model, optimizer=adamw(trained), config=config(size, stage, **sections))[0]


@on_ranks(4)
def test_tensor_ranks_see_the_same_batch() -> None:
    """Another sample, another mask, another length: all ranks of the tensor group say so, before anything is wrong."""
    engine = _engine(llama(), 2, 1)
    rank = dist.get_rank()
    batch = ids(0, 0)
    mask = torch.ones(2, 9, dtype=torch.long)
    other_mask = mask.clone()
    other_mask[1, 8] = rank % 2
    for what, others in (
        ("'input_ids' differs", {"input_ids": ids(1, rank), "attention_mask": mask}),
        ("'attention_mask' differs", {"input_ids": batch, "attention_mask": other_mask}),
        ("'input_ids' differs", {"input_ids": batch[:, : 9 - rank % 2], "attention_mask": mask}),
        ("arguments differ", {"input_ids": batch} | ({"attention_mask": mask} if rank % 2 else {})),
    ):
        engine(input_ids=batch, attention_mask=mask)
        with pytest.raises(DivergenceError, match=f"share the layers .* but were given different batches: {what}"):
            engine(**others)
    state = torch.get_rng_state()
    gathered = [torch.empty_like(state) for _ in range(4)]
    dist.all_gather(gathered, state)
    assert torch.equal(gathered[rank], gathered[rank // 2 * 2])
    engine.destroy()
    loader = deepspeed.initialize(
        model=llama(), config=config(2, 0), training_data=[torch.tensor(n) for n in range(16)]
    )[2]
    seen = torch.cat(list(loader)).sort().values
    gathered = [torch.empty_like(seen) for _ in range(4)]
    dist.all_gather(gathered, seen)
    assert torch.equal(gathered[0], gathered[1]) and torch.equal(gathered[2], gathered[3])
    assert sorted(torch.cat([gathered[0], gathered[2]]).tolist()) == list(range(16))


class Dropping(nn.Module):
    """A block with dropout on what is whole and, under the tracker, on what is cut."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.rise, self.fall = nn.Linear(8, 16), nn.Linear(16, 8)
        self.seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.dropout(x, 0.5)
        inner = torch.ones_like(self.rise(x))
        with checkpointing.get_cuda_rng_tracker().fork():
            mask = nn.functional.dropout(inner, 0.5)
        self.seen.append((x.detach().clone(), mask.detach().clone()))
        return self.fall(self.rise(x) * mask)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpointing.checkpoint(self._inner, x).square().mean()


@on_ranks(2)
def test_random_numbers_are_alike_where_all_is_whole_and_differ_where_it_is_cut() -> None:
    patterns = [{"patterns": ["rise.weight"]}, {"patterns": ["fall.weight"], "partition_type": "row"}]
    section = {"autotp_size": 2, "partition_config": {"layer_specs": patterns}}
    torch.manual_seed(dist.get_rank())
    model = Dropping()
    engine = _engine(model, 2, 1, tensor_parallel=section)
    checkpointing.model_parallel_cuda_manual_seed(5)
    engine.backward(engine(torch.ones(2, 8, requires_grad=True)))
    (first, mask), (again, mask_again) = model.seen
    assert torch.equal(first, again) and torch.equal(mask, mask_again)
    for mine, is_whole in ((first, True), (mask, False)):
        gathered = [torch.empty_like(mine) for _ in range(2)]
        dist.all_gather(gathered, mine)
        assert torch.equal(*gathered) == is_whole


@on_ranks(2)
def test_precisions_and_offload() -> None:
    """bf16, fp16 with a first overflow, autocast, both offloads: the losses fall as those of the whole model do."""
    expected = plain_run(llama(), 4, 1)
    for stage, sections in (
        (2, {"bf16": {"enabled": True}}),
        (1, {"fp16": {"enabled": True, "initial_scale_power": 6}}),
        (0, {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}),
    ):
        engine = _engine(llama(), 2, stage, **sections)
        for step, loss in enumerate(expected.losses):
            found = loss_of(engine, 10 * step, 0)
            engine.backward(found)
            engine.step()
            assert found.item() == pytest.approx(loss, rel=2e-2), (sections, step)
            assert math.isfinite(engine.get_global_grad_norm())
        engine.destroy()
    offloaded = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    engine = _engine(llama(), 2, 3, zero_optimization=offloaded)
    train_like(engine, expected, loss_of, 0)
    engine.destroy()


def _adapters(cells):
    """LoRA on a frozen base, on column- and row-parallel layers, without and with ``torch.compile``."""
    from peft import LoraConfig, get_peft_model

    def adapted():
        torch.manual_seed(2)
        chosen = LoraConfig(
            r=3, target_modules=["q_proj", "k_proj", "o_proj", "gate_proj", "down_proj"], lora_dropout=0.0
        )
        model = get_peft_model(llama(), chosen)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.1)
        return model

    expected = plain_run(adapted(), 3, 1)
    for stage, is_compiled in cells:
        model = adapted()
        engine = _engine(model, 2, stage)
        for block in model.base_model.model.model.layers if is_compiled else ():
            block.compile(backend="aot_eager")
        train_like(engine, expected, loss_of, 0)
        full = engine._consolidated_16bit_state_dict()
        if full is not None:
            assert_weights_equal(full, expected.state)
        engine.destroy()
        torch._dynamo.reset()


@pytest.mark.parametrize("cells", [[(0, False), (3, False)], pytest.param([(1, True)], marks=pytest.mark.slow)])
def test_adapters_on_a_frozen_base(cells):
    pytest.importorskip("peft")
    run_ranks(_adapters, 2, cells)


@on_ranks(2)
def test_a_program_requests_cutting_by_tp_model_init() -> None:
    model = deepspeed.tp_model_init(llama(), 2, torch.float32)
    with pytest.raises(DeepSpeedConfigError, match="tp_model_init: it was called before"):
        deepspeed.tp_model_init(model, 4, torch.float32)
    with pytest.raises(DeepSpeedConfigError, match="autotp_size is 4, but tp_model_init was called with tp_size 2"):
        deepspeed.initialize(model=model, config=config(4, 0))
    with pytest.raises(DeepSpeedConfigError, match=r"tp_model_init\(dtype=torch.float16\)"):
        requested = deepspeed.tp_model_init(llama(), 2, torch.float16)
        deepspeed.initialize(model=requested, config=config(0, 0, bf16={"enabled": True}))
    engine = deepspeed.initialize(model=model, config=config(0, 0))[0]
    batch = ids(0, 0)
    copied = copy.deepcopy(model)  # as programs make running averages
    assert torch.equal(copied(input_ids=batch).logits, model(input_ids=batch).logits)
    assert engine.mp_world_size == 2 and model.lm_head.weight.shape[0] < 67 and model.ds_autotp_parsed
    engine.destroy()
    again = deepspeed.initialize(model=model, config=config(0, 0))[0]  # a model that is cut is not cut again
    assert model.lm_head.weight.shape[0] in (33, 34)
    again.destroy()
