"""Every technique at once, at every stage, against plain torch with the formulas written out; resumed bit for bit."""

from typing import Any

import pytest
import torch

from deepspeed.compression import compression_state, init_compression
from tests.engine.support import adamw
from tests.harness import run_ranks
from tests.harness.cases import Cell, train_and_resume
from tests.harness.toy_models import tiny_gpt

pytest.importorskip("transformers")

STEPS, SAVED = 6, 3
HEADS, WIDTH, VOCABULARY = 3, 12, 20


def technique(shared: dict[str, Any], params: dict[str, Any], modules: list[str], **more: Any) -> dict[str, Any]:
    group = {"params": params, "modules": modules, **more}
    return {"shared_parameters": {"enabled": True, **shared}, "different_groups": {"only": group}}


SECTION = {
    "weight_quantization": technique(
        {"schedule_offset": 1, "quantize_groups": 6, "quantization_type": "asymmetric"},
        {"start_bits": 6, "target_bits": 4, "quantization_period": 1},
        ["wte", "attn", "mlp"],
    ),
    "activation_quantization": technique({"schedule_offset": 2}, {"bits": 8}, ["c_attn", "c_fc"]),
    "sparse_pruning": technique({"method": "topk", "schedule_offset": 2}, {"dense_ratio": 0.7}, ["c_attn"]),
    "row_pruning": technique(
        {"method": "l1", "schedule_offset": 3}, {"dense_ratio": 0.5}, ["c_fc"], related_modules=[["mlp.c_proj"]]
    ),
    "head_pruning": technique(
        {"method": "topk", "num_heads": HEADS, "schedule_offset": 1},
        {"dense_ratio": 0.6},
        ["attn.c_proj"],
        related_modules=[["c_attn"]],
    ),
}


def prepared() -> Any:
    model = tiny_gpt()
    torch.manual_seed(1)  # the scores
    return init_compression(model, {"compression_training": SECTION})


def tokens(step: int, micro: int, of_rank: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(100 * step + 10 * micro + of_rank))


# -- plain torch ---------------------------------------------------------------------------------------------------


def fake(weight: torch.Tensor, bits: int, groups: int) -> torch.Tensor:
    """Asymmetric rounding of ``[out, in]``, with the gradient of the weight."""
    flat = weight.detach().reshape(groups, -1)
    low, high = flat.amin(1, keepdim=True), flat.amax(1, keepdim=True)
    s = (high - low) / 2**bits
    z = (low / s).round() * s
    q = (((flat - z) / s).round().clamp(0, 2**bits - 1) * s + z).view(weight.shape)
    return weight + (q - weight).detach()


def kept(scores: torch.Tensor, share: float) -> torch.Tensor:
    """Ones for the largest scores, with the scores' gradient."""
    count = -int(-share * scores.numel() // 1)
    least = scores.detach().flatten().sort(descending=True).values[count - 1]
    return scores + ((scores >= least).float() - scores).detach()


def effective(values: dict[str, torch.Tensor], step: int, fixed: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights that the forward of a step computes with."""
    found = dict(values)
    bits = None if step < 1 else max(6 - (step >= 2) - (step >= 3), 4)
    if bits is not None:
        found["transformer.wte.weight"] = fake(values["transformer.wte.weight"], bits, VOCABULARY)
    found["lm_head.weight"] = found["transformer.wte.weight"]
    for layer in range(2):
        for part in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"):
            name = f"transformer.h.{layer}.{part}"
            weight = values[f"{name}.weight"].t()
            if bits is not None:
                weight = fake(weight, bits, 6)
            if part == "attn.c_attn" and step >= 2:
                weight = weight * kept(values[f"{name}.sparse_mask_scores"], 0.7)
            if part == "mlp.c_fc" and step >= 3:
                weight = weight * fixed[name][:, None]
                found[f"{name}.bias"] = values[f"{name}.bias"] * fixed[name]
            if part == "attn.c_proj" and step >= 1:
                heads = kept(values[f"{name}.head_pruning_scores"], 0.6).flatten()
                weight = weight * heads.repeat_interleave(WIDTH // HEADS)
            found[f"{name}.weight"] = weight.t()
            found.pop(f"{name}.sparse_mask_scores", None)
            found.pop(f"{name}.head_pruning_scores", None)
    return found


def round_tokens(module: Any, args: Any) -> Any:
    x = args[0]
    s = 2 * x.detach().abs().amax(-1, keepdim=True) / 256
    q = (x.detach() / s).round().clamp(-128, 127) * s
    return (x + (q - x).detach(), *args[1:])


def plain() -> list[float]:
    """The first rank's losses in one process."""
    model, trained = tiny_gpt(), prepared()
    values = {name: p.detach().clone().requires_grad_() for name, p in trained.named_parameters()}
    fixed = {}
    for layer in range(2):
        name = f"transformer.h.{layer}.mlp.c_fc"
        sizes = values[f"{name}.weight"].detach().abs().sum(0)
        fixed[name] = (sizes >= sizes.sort(descending=True).values[sizes.numel() // 2 - 1]).float()
    parent = torch.nn.Module()
    for number, value in enumerate(values.values()):
        parent.register_parameter(str(number), torch.nn.Parameter(value))
    values = dict(zip(values, parent.parameters(), strict=True))
    optimizer = adamw(parent)
    losses = []
    for step in range(STEPS):
        if step == 2:
            for name, module in model.named_modules():
                if name.endswith(("c_attn", "c_fc")):
                    module.register_forward_pre_hook(round_tokens)
        batch = [tokens(step, 0, each) for each in range(2)]
        weights = effective(values, step, fixed)
        parts = [
            torch.func.functional_call(model, weights, kwargs={"input_ids": each, "labels": each}).loss
            for each in batch
        ]
        (sum(parts) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(parts[0].item())
    return losses


# -- the engine ----------------------------------------------------------------------------------------------------


CELLS = [
    Cell(1),
    Cell(2, "bf16", 2),
    Cell(3),
    Cell(3, "bf16", 2, offload=True),
    Cell(3, "fp16", recompute=True),
]


def loss_of(model: Any, step: int, micro: int, of_rank: int) -> torch.Tensor:
    batch = tokens(step, micro, of_rank)
    return model(input_ids=batch, labels=batch).loss


def run(cell: Cell, folder: Any) -> list[float]:
    def look(engine: Any) -> None:
        assert engine.skipped_steps == 0
        states = {state.name: state for state in compression_state(engine.module)}
        assert states["transformer.wte"].bits == 4 and states["lm_head"].bits == 4
        assert states["transformer.h.1.mlp.c_fc"].kept == {"row": 0.5}
        assert states["transformer.h.0.attn.c_attn"].activation_bits == 8
        assert engine.module.lm_head.weight is engine.module.transformer.wte.weight

    def loaded(engine: Any) -> None:
        assert engine.compression_scheduler.training_steps == SAVED

    def start() -> Any:
        return cell.engine(prepared(), compression_training=SECTION)

    return train_and_resume(start, loss_of, folder, steps=STEPS, saved=SAVED, look=look, loaded=loaded)


def run_all(folder: Any) -> dict[Cell, list[float]]:
    references = {(cell.precision, cell.accumulation) for cell in CELLS}
    cells = [*(Cell(0, *each) for each in sorted(references)), *CELLS]
    return {cell: run(cell, folder / str(number)) for number, cell in enumerate(cells)}


def test_every_stage_has_the_losses_of_plain_torch_and_resumes(tmp_path):
    found = run_ranks(run_all, 2, tmp_path, timeout=240)[0]
    assert found[Cell(0)] == pytest.approx(plain(), rel=2e-4)
    assert len(set(found[Cell(0)])) == STEPS
    for cell in CELLS:
        like = found[Cell(0, cell.precision, cell.accumulation)]
        assert found[cell] == pytest.approx(like, rel={"fp32": 1e-5, "bf16": 2e-2, "fp16": 5e-3}[cell.precision]), cell
