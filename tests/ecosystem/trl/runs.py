"""Words for tokens, two small data sets and the arguments that all TRL runs share."""

from typing import Any

import torch

WORDS = 97
STEPS = 4


def tokenizer() -> Any:
    """One token per word ``w3`` ... ``w96``."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{f"w{number}": number for number in range(3, WORDS)}}
    base = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    base.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=base, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def _words(first: int, stride: int, count: int) -> str:
    return " ".join(f"w{3 + (first + stride * n) % (WORDS - 3)}" for n in range(count))


def _starts(count: int) -> list[int]:
    return torch.randint(0, WORDS, (count,), generator=torch.Generator().manual_seed(4)).tolist()


def texts(count: int = 48) -> Any:
    """Sequences of different lengths with a pattern."""
    from datasets import Dataset

    return Dataset.from_list([{"text": _words(start, 1, 6 + n % 5)} for n, start in enumerate(_starts(count))])


def pairs(count: int = 48) -> Any:
    """Prompts whose right answer continues with the pattern."""
    from datasets import Dataset

    rows = []
    for number, start in enumerate(_starts(count)):
        right, wrong = _words(start + 4, 1, 3), _words(start, 7, 2 + number % 3)
        rows.append({"prompt": _words(start, 1, 4), "chosen": f" {right}", "rejected": f" {wrong}"})
    return Dataset.from_list(rows)


def arguments(kind: Any, folder: str, config: Any = None, **more: Any) -> Any:
    """Arguments of a TRL trainer; without a configuration for plain data parallelism on the CPU."""
    given = {
        "max_steps": STEPS, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "learning_rate": 0.01,
        "logging_steps": 1, "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "seed": 3,
        "dataloader_pin_memory": False, "bf16": False, "gradient_checkpointing": False, "max_grad_norm": 0.5,
        "deepspeed": config, "use_cpu": config is None, "max_length": 16,
    }  # fmt: skip
    if not hasattr(kind, "max_length"):
        del given["max_length"]
    return kind(folder, **{**given, **more})
