"""Expert layers in bad cases: values not finite, no tokens, no capacity, ranks that differ, offload to files."""

import os
import re
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.errors import CommunicationError, DeepSpeedConfigError, NotYetSupportedError
from deepspeed.moe.layer import MoE
from deepspeed.moe.sharded_moe import topkgating
from deepspeed.moe.utils import is_moe_param
from deepspeed.ops.lamb import FusedLamb
from deepspeed.utils import safe_get_full_fp32_param
from tests.engine.support import SHARDED, WIDTH, adamw, engine_of, rank
from tests.harness import RankDied, on_ranks, run_ranks
from tests.parallel.expert.models import VOCABULARY, batch, build
from tests.parallel.expert.test_auto import adamw as adamw_of
from tests.parallel.expert.test_auto import config, of_this_rank
from tests.parallel.expert.test_combinations import _losses, _net
from tests.parallel.expert.test_layer import Net, close, distinguished, logical, tokens
from tests.parallel.pipe.test_never_hang import SOON, raised_by


class Summed(Net):
    """A sum, so that a rank without tokens has a loss."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)[0]
        return self.last(x).square().sum()


def _no_numbers() -> None:
    """One rank's NaN reaches the others' experts; nobody hangs, whichever gate it is."""
    for k in (1, 2, 3):
        engine = engine_of(_net(2, k=k, top2_2nd_expert_sampling=False), 2)
        x = tokens(0, 0, rank())
        engine.backward(engine(torch.full_like(x, float("nan")) if rank() == 1 else x))
        engine.step()
        assert not torch.isfinite(torch.tensor(engine.get_global_grad_norm()))
        engine.destroy()


def _lamb() -> None:
    """LAMB's norms are those of whole tensors: at stage 0 it trains, with sharded masters it is refused by name."""
    engine_of(_net(2), 0, optimizer=lambda model: FusedLamb(model.parameters())).destroy()
    with pytest.raises(NotYetSupportedError, match="FusedLamb works on whole tensors, but has 'blocks.*AdamW"):
        engine_of(_net(2), 1, optimizer=lambda model: FusedLamb(model.parameters()))


def _no_tokens() -> None:
    """A rank that brings nothing, against one process."""
    for stage in (0, 2, 3):
        reference, model = Summed((1, 1), drop_tokens=False), Summed((2, 2), drop_tokens=False)
        distinguished(reference)
        distinguished(model)
        optimizer = adamw(reference)
        engine = engine_of(model, stage, zero=dict(SHARDED) if stage == 3 else {})
        for step in range(2):
            batches = [torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(step)) for n in (0, 5)]
            batches = batches if step else batches[::-1]
            engine.backward(engine(batches[rank()]))
            engine.step()
            optimizer.zero_grad()
            (sum(reference(each) for each in batches) / 2).backward()
            optimizer.step()
        wanted = dict(reference.named_parameters())
        for name, parameter in logical(engine.module).items():
            close(safe_get_full_fp32_param(parameter), wanted[name].detach(), f"{name}, stage {stage}")
        engine.destroy()


def _no_room() -> None:
    """Capacity 0: every route is dropped, experts stay as they are."""
    engine = engine_of(_net(2, capacity_factor=0.0, min_capacity=0), 2)
    experts = [p for p in engine.module.parameters() if is_moe_param(p)]
    before = [safe_get_full_fp32_param(p).clone() for p in experts]
    engine.backward(engine(tokens(0, 0, rank())))
    engine.step()
    assert all(map(torch.equal, before, map(safe_get_full_fp32_param, experts)))
    balance = engine.module.blocks[0].deepspeed_moe.balance
    assert balance.dropped_share == 1.0 and balance.imbalance == 1.0
    with pytest.raises(DeepSpeedConfigError, match="k=5, num_experts=4.: a token goes to at least 1 and at most all"):
        MoE(WIDTH, nn.Linear(WIDTH, WIDTH), 4, ep_size=2, k=5)
    with pytest.raises(DeepSpeedConfigError, match="topkgating.k=5.: the logits are of 4 experts"):
        topkgating(torch.zeros(3, 4), 5, 1.0, 1)


def _frozen() -> None:
    for stage in (1, 3):
        found = []
        for ep_size in (1, 2):
            model = _net(ep_size)
            for name, parameter in model.named_parameters():
                parameter.requires_grad_("deepspeed_experts" not in name and "blocks.1.deepspeed_moe.gate" not in name)
            before = {name: p.detach().clone() for name, p in logical(model).items() if not p.requires_grad}
            engine = engine_of(model, stage, zero=dict(SHARDED) if stage == 3 else {})
            found.append(_losses(engine))
            for name, parameter in logical(engine.module).items():
                if name in before:
                    with deepspeed.zero.GatheredParameters([parameter]):
                        assert torch.equal(parameter, before[name]), name
            engine.destroy()
        assert found[0] == pytest.approx(found[1], rel=1e-5) and found[0][0] != found[0][2]


def _two_models() -> None:
    """A layer of ours and a Transformers model, of other stages and sizes, turn by turn as each alone."""

    def makers() -> list[Any]:
        model = build("mixtral")
        spread = deepspeed.initialize(model=model, optimizer=adamw_of(model), config=config(3, 2))[0]
        return [engine_of(_net(2), 1), spread]

    def step(engine: Any, number: int) -> float:
        torch.manual_seed(number)
        of_net = isinstance(engine.module, Net)
        loss = engine(tokens(number, 0, rank())) if of_net else engine(**batch(number, rank())).loss
        engine.backward(loss)
        engine.step()
        return loss.item()

    alone = [[step(engine, number) for number in range(3)] for engine in makers()]
    together = makers()
    turns = [[step(engine, number) for engine in together] for number in range(3)]
    assert alone == [list(losses) for losses in zip(*turns, strict=True)]


def _in_files(folder: str) -> None:
    nvme = {"device": "nvme", "nvme_path": folder}
    plain = engine_of(_net(2), 3, zero=dict(SHARDED))
    offloaded = engine_of(_net(2), 3, zero={**SHARDED, "offload_optimizer": nvme, "offload_param": nvme})
    assert _losses(plain) == pytest.approx(_losses(offloaded), abs=1e-6)
    for one, other in zip(plain.module.parameters(), offloaded.module.parameters(), strict=True):
        torch.testing.assert_close(safe_get_full_fp32_param(one), safe_get_full_fp32_param(other), rtol=1e-5, atol=1e-6)


def _times() -> None:
    engine = engine_of(_net(2), 1, wall_clock_breakdown=True)
    engine(tokens(0, 0, rank()))
    for block in engine.module.blocks:
        layer = block.deepspeed_moe
        assert layer.time_moe > layer.time_falltoall > 0 and layer.time_moe > layer.time_salltoall > 0
        assert layer.gate.gate_time > 0


def _generates() -> None:
    """Prompts of other lengths on every rank, then token by token with a cache, as the model in one process."""
    for stage in (0, 3):
        plain, model = build("mixtral").eval(), build("mixtral")
        settings = config(stage)
        engine = deepspeed.initialize(model=model, optimizer=adamw_of(model), config=settings)[0]
        engine.eval()
        draws = torch.Generator().manual_seed(rank())
        ids = torch.randint(3, VOCABULARY, (1, 7 if rank() == 0 else 2), generator=draws)
        with torch.no_grad():
            past, expected_past, now = None, None, ids
            for _ in range(5):
                found = engine(input_ids=now, past_key_values=past, use_cache=True, output_router_logits=False)
                wanted = plain(input_ids=now, past_key_values=expected_past, use_cache=True, output_router_logits=False)
                close(found.logits, wanted.logits, f"stage {stage}")
                past, expected_past = found.past_key_values, wanted.past_key_values
                now = wanted.logits[:, -1:].argmax(-1)
            if stage == 0:
                requested: dict[str, Any] = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
                assert torch.equal(engine.module.generate(ids, **requested), plain.generate(ids, **requested))
        engine.destroy()


def _odd_gates() -> None:
    """Room for one token at each expert, every token to every expert, nothing chosen on one rank or on all."""
    for options in (
        {"capacity_factor": 1e-6, "min_capacity": 1, "use_rts": False},
        {"k": 4, "drop_tokens": False, "capacity_factor": 0.1},
    ):
        found = [_losses(engine_of(_net(ep_size, **options), 2)) for ep_size in (1, 2)]
        assert found[0] == pytest.approx(found[1], abs=1e-6), options
    layer = MoE(WIDTH, nn.Linear(WIDTH, WIDTH), 4, ep_size=2)
    for used in ((0, 0), (0, 1)):
        x = torch.randn(5, WIDTH, requires_grad=True)
        out = layer(x, torch.full((5,), used[rank()]))[0]
        out.square().sum().backward()
        assert (out.abs().sum() > 0) == bool(used[rank()]) and torch.isfinite(x.grad).all()


def _one_expert_overflows() -> None:
    """Only on the rank that has it; everybody skips the step, and all go on from equal weights."""
    for stage in (1, 3):
        zero = dict(SHARDED) if stage == 3 else {}
        engine = engine_of(_net(2), stage, zero=zero, fp16={"enabled": True, "initial_scale_power": 4, "hysteresis": 1})
        expert = next(p for name, p in engine.module.named_parameters() if "deepspeed_experts.0" in name)
        before = [safe_get_full_fp32_param(p).clone() for p in engine.module.parameters()]
        handle = expert.register_hook(lambda g: g * float("inf")) if rank() == 1 else None
        for is_kept in (True, False):
            engine.backward(engine(tokens(0, 0, rank())))
            engine.eval()
            with torch.no_grad():  # an evaluation between a backward and its update
                engine(tokens(1, 0, rank()))
            engine.train()
            engine.step()
            after = [safe_get_full_fp32_param(p) for p in engine.module.parameters()]
            assert all(map(torch.equal, before, after)) == is_kept, f"stage {stage}"
            if handle is not None and is_kept:
                handle.remove()
        assert engine.skipped_steps == 1
        engine.destroy()


def _all_to_one_rank() -> None:
    """Two experts get every token; other ranks' parts of the stacks decay as a whole stack does in plain torch."""
    world, ep_size = torch.distributed.get_world_size(), 2

    def undecided(seed: int) -> nn.Module:
        model: nn.Module = build("mixtral", seed, num_local_experts=6)
        for name, parameter in model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                nn.init.zeros_(parameter.requires_grad_(False))
        return model

    for stage in (0, 2, 3):
        expected, model = undecided(0), undecided(rank())
        optimizer = adamw_of(expected)
        engine = deepspeed.initialize(model=model, optimizer=adamw_of(model), config=config(stage, ep_size))[0]
        for step in range(3):
            optimizer.zero_grad()
            losses = [expected(**batch(step, other)).loss for other in range(world)]
            (sum(losses) / world).backward()
            nn.utils.clip_grad_norm_(expected.parameters(), 0.5)
            optimizer.step()
            loss = engine(**batch(step, rank())).loss
            assert loss.item() == pytest.approx(losses[rank()].item(), abs=1e-5)
            engine.backward(loss)
            engine.step()
            with torch.no_grad():  # between steps
                found = engine.eval()(**batch(9, rank())).loss.item()
                assert found == pytest.approx(expected(**batch(9, rank())).loss.item(), abs=1e-5)
            engine.train()
        wanted = dict(expected.named_parameters())
        for name, parameter in engine.module.named_parameters():
            if parameter.requires_grad:
                close(
                    safe_get_full_fp32_param(parameter), of_this_rank(parameter, wanted[name].detach(), ep_size), name
                )
        engine.destroy()


BODIES = [
    _all_to_one_rank,
    _odd_gates,
    _one_expert_overflows,
    _no_numbers,
    _lamb,
    _no_tokens,
    _no_room,
    _frozen,
    _two_models,
    _times,
    _generates,
]


@on_ranks(2, timeout=300)
def test_on_two_ranks() -> None:
    names = [body.__name__ for body in BODIES]
    for body in BODIES:
        if body.__name__ in names:
            body()


def test_experts_in_files() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(_in_files, 2, folder, timeout=200)


def _dies(text: str) -> None:
    """Rank 1 ends before its second layer's experts, where the other waits for what they make of its tokens."""
    model = build("mixtral")
    engine = deepspeed.initialize(model=model, optimizer=adamw_of(model), config=config(1))[0]
    if rank() == 1:
        layers = [module for name, module in engine.module.named_modules() if name.endswith("experts")]
        layers[1].register_forward_pre_hook(lambda *_: os._exit(7))
    started = time.monotonic()
    try:
        engine(**batch(0, rank()))
    except CommunicationError as error:
        Path(text).write_text(f"{time.monotonic() - started} {error}")
        raise


def test_a_rank_that_ends_is_named(tmp_path: Path) -> None:
    with pytest.raises(RankDied):
        run_ranks(_dies, 2, str(tmp_path / "text"), fresh=True)
    seconds, _, text = (tmp_path / "text").read_text().partition(" ")
    words = r"process of rank 1 has died .* while rank 0 waits for .*how many tokens go to each expert"
    assert float(seconds) < SOON and re.search(words, text), text


def _evaluates_alone() -> tuple[str, float]:
    """Rank 0 evaluates by itself, while the other continues training."""
    engine = engine_of(_net(2, k=1), 2)
    x = tokens(0, 0, rank())

    def train() -> None:
        if rank() == 0:
            with torch.no_grad():
                engine(x)
        for _ in range(2):
            engine.backward(engine(x))
            engine.step()

    return raised_by(train)


def test_a_rank_that_evaluates_alone_is_named():
    """Its counts would meet the other's rows, of another size, which ends the process."""
    for text, seconds in run_ranks(_evaluates_alone, 2):
        assert text.startswith("DivergenceError: ranks took different branches") and seconds < SOON
        assert "how many tokens go to each expert" in text
