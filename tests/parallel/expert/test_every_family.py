"""Every family with experts, from a folder of plain Transformers back to one: loaded, cut, trained, saved, loaded."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import deepspeed
from deepspeed.errors import DeepSpeedConfigError
from tests.engine.support import SHARDED, rank
from tests.harness import on_first_rank, run_ranks
from tests.parallel.expert.every_family import VOCABULARY, build, families, loss_of
from tests.zero.construction.pretrained import zero3_switched_on

STEPS = 3
CUTS = {
    "experts": {"expert_parallel": {"enabled": True, "autoep_size": 2}},
    "tensor": {"tensor_parallel": {"autotp_size": 2}},
}
REFUSED = {("zaya", "tensor"): "no rule cuts ZayaForCausalLM; it brings no tensor-parallel plan"}
FEW = {"longcat_flash": "experts", "inkling_text": "tensor", "qwen3_5_moe_text": "tensor", "deepseek_v4": "experts"}


def _batch(step: int, of_rank: int) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(100 * step + of_rank))


def _adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3, eps=1e-5, weight_decay=0.1)


def _losses(model: torch.nn.Module, ranks: int) -> list[list[float]]:
    """Trains a model by plain torch; returns its losses by step and rank."""
    optimizer, found = _adamw(model), []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = [loss_of(model, _batch(step, other)) for other in range(ranks)]
        (sum(losses) / ranks).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        found.append([loss.item() for loss in losses])
    return found


@on_first_rank
def _plain(kind: type[Any], folder: str, ranks: int) -> tuple[list[list[float]], dict[str, torch.Tensor], float, float]:
    """Saves a model; returns losses and weights of plain torch, and how far a change of 1e-7 of all weights moves them.

    In some families such a change grows to 1e-2 in five steps.
    """
    model, changed = build(kind), build(kind)
    model.save_pretrained(folder)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.mul_(1 + 1e-7)
    losses, others = _losses(model, ranks), _losses(changed, ranks)
    drift = max(abs(a - b) for one, other in zip(losses, others, strict=True) for a, b in zip(one, other, strict=True))
    weights = {name: value.detach() for name, value in model.named_parameters()}
    moved = max(float((weights[name] - value).abs().max()) for name, value in changed.named_parameters())
    return losses, weights, drift, moved


def _load(kind: type[Any], folder: str | Path, **more: Any) -> Any:
    return kind.from_pretrained(folder, attn_implementation="eager", **more)


def _there_and_back(kind: type[Any], stage: int, cut: str, folder: str) -> None:
    data = 2 if cut == "experts" else 1
    place = rank() if cut == "experts" else 0
    losses, weights, drift, moved = _plain(kind, f"{folder}/before", data)
    zero = {"stage": stage, **({**SHARDED, "stage3_gather_16bit_weights_on_model_save": True} if stage == 3 else {})}
    settings = {
        "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.5, "zero_optimization": zero, **CUTS[cut],
    }  # fmt: skip
    with zero3_switched_on(settings) if stage == 3 else contextlib.nullcontext():
        model = _load(kind, f"{folder}/before")
    engine = deepspeed.initialize(model=model, optimizer=_adamw(model), config=settings)[0]
    for step in range(STEPS):
        loss = loss_of(engine, _batch(step, place))
        expected = losses[step][place]
        assert loss.item() == pytest.approx(expected, abs=max(1e-5, 20 * drift)), f"step {step}, drift {drift:.1e}"
        engine.backward(loss)
        engine.step()
    exported = dict(engine.export_weights())
    engine.save_16bit_model(f"{folder}/after", "model.safetensors")
    if rank() == 0:
        engine.module.config.save_pretrained(f"{folder}/after")
        off = {name: float((exported[name] - value).abs().max()) for name, value in weights.items() if name in exported}
        assert max(off.values()) <= max(2e-5, 20 * moved), (
            max(off, key=lambda name: off[name]),
            max(off.values()),
            moved,
        )
        _check_saved(kind, exported, Path(folder))
    dist.barrier()
    engine.destroy()


def _check_saved(kind: type[Any], exported: dict[str, torch.Tensor], folder: Path) -> None:
    loaded, problems = _load(kind, folder / "after", output_loading_info=True)
    assert not any(problems.values()), problems
    state = loaded.state_dict()
    for name, value in exported.items():
        assert torch.equal(state[name], value), f"{name} is loaded with other values"
    loaded.save_pretrained(folder / "again")
    again = _load(kind, folder / "again").state_dict()
    assert all(torch.equal(again[name], value) for name, value in state.items())


def _cells(cells: list[tuple[str, type[Any], int, str]], folder: str) -> None:
    import transformers

    transformers.utils.logging.set_verbosity_error()
    failures = []
    for name, kind, stage, cut in cells:
        words = REFUSED.get((name, cut))
        refused = contextlib.nullcontext() if words is None else pytest.raises(DeepSpeedConfigError, match=words)
        try:
            with refused:
                _there_and_back(kind, stage, cut, f"{folder}/{name}-{stage}-{cut}")
        except Exception as error:  # all families are tried
            failures.append(f"{name}, stage {stage}, cut by {cut}: {type(error).__name__}: {error}")
    assert not failures, "\n".join(failures)


def _run(folder: Path, cells: list[tuple[str, type[Any], int, str]]) -> None:
    run_ranks(_cells, 2, cells, str(folder), timeout=120 + 20 * len(cells))


def test_a_few_families(tmp_path: Path) -> None:
    known = families(FEW)
    _run(tmp_path, [(name, known[name], 3, cut) for name, cut in FEW.items()])


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
def test_every_family(tmp_path: Path, stage: int) -> None:
    _run(tmp_path, [(name, kind, stage, cut) for name, kind in families().items() for cut in CUTS])
