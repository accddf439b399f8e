"""Accelerate and the Trainer, unmodified: what they train is what plain torch trains on whole sequences."""

import tempfile

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

import deepspeed
from tests.ecosystem.support import needs_transformers, on_cpu_ranks
from tests.harness import on_ranks, run_ranks
from tests.parallel.sequence.llama import llama

pytestmark = needs_transformers

LR = 0.1


def _rows(count, length=12):
    """Sequences of which another part counts in each."""
    generator = torch.Generator().manual_seed(5)
    made = []
    for number in range(count):
        ids = torch.randint(1, 23, (length,), generator=generator)
        labels = ids.clone()
        labels[: 2 + number % 5] = -100
        made.append({"input_ids": ids, "labels": labels})
    return made


def _sharing(size, attention="sdpa"):
    from accelerate.utils import DeepSpeedSequenceParallelConfig, ParallelismConfig

    handler = DeepSpeedSequenceParallelConfig(
        sp_seq_length=12, sp_seq_length_is_variable=True, sp_attn_implementation=attention
    )
    return ParallelismConfig(sp_backend="deepspeed", sp_size=size, sp_handler=handler)


class Whole:
    """Trains a second model with plain torch on the whole sequences of all data ranks, as the first one gets parts."""

    def __init__(self, size):
        self.model = llama()
        self.size = size
        self.losses, self.norms = [], []

    def step(self, part):
        batch = {}
        for name in ("input_ids", "shift_labels"):
            parts = [torch.empty_like(part[name]) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, part[name].contiguous())
            batch[name] = [torch.cat(parts[first : first + self.size], 1) for first in range(0, len(parts), self.size)]
        self.model.zero_grad()
        losses = []
        for ids, labels in zip(batch["input_ids"], batch["shift_labels"], strict=True):
            logits = self.model(input_ids=ids, use_cache=False).logits
            losses.append(functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))
        torch.stack(losses).mean().backward()
        self.losses.append(losses[dist.get_rank() // self.size].item())
        self.norms.append(torch.stack([p.grad.norm() for p in self.model.parameters()]).norm().item())
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter -= LR * parameter.grad

    def agrees_with(self, model):
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            for (name, found), wanted in zip(model.named_parameters(), self.model.parameters(), strict=True):
                torch.testing.assert_close(
                    found.detach(), wanted.detach(), rtol=1e-5, atol=1e-5, msg=lambda text: f"{name}: {text}"  # noqa: B023
                )  # fmt: skip


@pytest.mark.parametrize(
    ("ranks", "size", "stage", "attention"),
    [
        (2, 2, 2, None),
        (4, 2, 3, "sdpa"),
        *(pytest.param(4, 4, stage, "sdpa", marks=pytest.mark.slow) for stage in (0, 1, 3)),
    ],
)
@on_ranks()
@on_cpu_ranks
def test_accelerate(size, stage, attention) -> None:
    """The loop of Accelerate's documentation, with its way to put the loss together."""
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin
    from torch.distributed.nn.functional import all_gather

    from deepspeed.utils import groups

    config = {
        "zero_optimization": {"stage": stage}, "train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto",
        "gradient_accumulation_steps": 1, "gradient_clipping": 0.0,
    }  # fmt: skip
    plugin = DeepSpeedPlugin(hf_ds_config=config)
    accelerator = Accelerator(deepspeed_plugin=plugin, parallelism_config=_sharing(size, attention))
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    loader = torch.utils.data.DataLoader(_rows(4 * dist.get_world_size()), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    assert len(loader) == 2 * size
    group = groups._get_sequence_parallel_group()
    whole, losses = Whole(size), []
    unwrapped = accelerator.unwrap_model(model)
    for batch in loader:
        optimizer.zero_grad()
        whole.step(batch)
        batch = {name: value.to(model.device) for name, value in batch.items()}
        outputs = model(**batch)
        loss = unwrapped.loss_function(
            logits=outputs.logits, labels=None, shift_labels=batch["shift_labels"], vocab_size=23
        )
        shares = all_gather(loss, group=group)
        good = all_gather((batch["shift_labels"] != -100).view(-1).sum(), group=group)
        loss = sum(shares[r] * good[r] for r in range(size) if good[r] > 0) / max(sum(good), 1)
        losses.append(loss.item())
        accelerator.backward(loss)
        optimizer.step()
        assert model.get_global_grad_norm() == pytest.approx(whole.norms[-1], rel=1e-4)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(whole.losses), rtol=1e-5, atol=1e-5)
    whole.agrees_with(model.module)


@pytest.mark.parametrize(
    ("ranks", "size", "stage"),
    [
        (2, 2, 2),
        *(pytest.param(4, size, stage, marks=pytest.mark.slow) for size, stage in ((2, 3), (4, 1), (4, 3))),
    ],
)
@on_ranks(timeout=180)
@on_cpu_ranks
def test_trainer(size, stage) -> None:
    from transformers import Trainer, TrainingArguments

    world = dist.get_world_size()
    config = {
        "zero_optimization": {"stage": stage}, "train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto",
        "gradient_accumulation_steps": "auto", "train_batch_size": "auto", "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        given = TrainingArguments(
            folder, deepspeed=config, parallelism_config=_sharing(size), per_device_train_batch_size=2, max_steps=4,
            logging_steps=1, report_to="none", disable_tqdm=True, save_strategy="no", max_grad_norm=0.0,
            dataloader_pin_memory=False, learning_rate=LR, lr_scheduler_type="constant", optim="sgd",
            eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=2,
        )  # fmt: skip
        model, whole = llama(), Whole(size)

        def look(module, args, kwargs):
            if module.training:
                whole.step({name: kwargs[name] for name in ("input_ids", "shift_labels")})

        trainer = Trainer(model, given, train_dataset=_rows(4 * world), eval_dataset=_rows(2 * world))
        handle = model.register_forward_pre_hook(look, with_kwargs=True)
        trainer.train()
        handle.remove()
        log = trainer.state.log_history
        norms = [entry["grad_norm"] for entry in log if "grad_norm" in entry]
        torch.testing.assert_close(torch.tensor(norms), torch.tensor(whole.norms), rtol=1e-4, atol=1e-5)
        losses = torch.tensor(whole.losses)
        dist.all_reduce(losses)
        found = torch.tensor([entry["loss"] for entry in log if "loss" in entry])
        torch.testing.assert_close(found, losses / world, rtol=1e-4, atol=1e-4)
        whole.agrees_with(model)
        # Evaluation's whole sequences are shared too, and the answers are those of plain torch for them.
        rows = _rows(2 * world)
        tokens = []
        handle = model.lm_head.register_forward_hook(lambda _module, _given, out: tokens.append(out.size(1)))
        found = trainer.evaluate()["eval_loss"]
        handle.remove()
        assert tokens == [12 // size] * size
        with torch.no_grad():
            ours = [
                whole.model(input_ids=row["input_ids"][None], labels=row["labels"][None]).loss.item() for row in rows
            ]
        counted = [int((row["labels"][1:] != -100).sum()) for row in rows]
        per_rank = [
            (ours[2 * r] * counted[2 * r] + ours[2 * r + 1] * counted[2 * r + 1]) / sum(counted[2 * r : 2 * r + 2])
            for r in range(world)
        ]
        assert found == pytest.approx(sum(per_rank) / world, rel=1e-4)


@on_cpu_ranks
def _resumes(folder, stage):
    """Half of a training, saved, and the rest by another Trainer, beside all of it at once."""
    from transformers import Trainer, TrainingArguments

    config = {
        "zero_optimization": {"stage": stage}, "train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto",
        "gradient_accumulation_steps": "auto", "train_batch_size": "auto",
    }  # fmt: skip
    found, seen = {}, {}
    for name, resume in (("whole", None), ("rest", f"{folder}/whole/checkpoint-3")):
        given = TrainingArguments(
            f"{folder}/{name}", deepspeed=config, parallelism_config=_sharing(2), per_device_train_batch_size=1,
            max_steps=6, logging_steps=1, report_to="none", disable_tqdm=True, save_strategy="steps", save_steps=3,
            dataloader_pin_memory=False, learning_rate=0.01, lr_scheduler_type="linear", seed=3,
        )  # fmt: skip
        model = llama()
        rows = []
        model.register_forward_pre_hook(lambda _m, _a, kw, rows=rows: rows.append(kw["input_ids"]), with_kwargs=True)
        trainer = Trainer(model, given, train_dataset=_rows(8))
        trainer.train(resume_from_checkpoint=resume)
        assert trainer.state.global_step == 6
        found[name], seen[name] = dict(trainer.model_wrapped.iter_full("fp32")), rows
    assert len(seen["whole"]) == 6 and len(seen["rest"]) == 3
    for one, other in zip(seen["whole"][3:], seen["rest"], strict=True):
        assert torch.equal(one, other)
    for name, value in found["whole"].items():
        assert torch.equal(found["rest"][name], value), name


@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_trainer_resumes(tmp_path, stage):
    run_ranks(_resumes, 2, str(tmp_path), stage, timeout=180)
