"""Measures the quality that each compression technique costs, and the size that it saves.

    python benchmarks/compression_of_models.py --text FILE [--scale 1.0] [--write-report]

Two small models learn from a text: a GPT-2 of 4 layers that predicts characters (perplexity on held-out text), and a
BERT of 4 layers that sees a sentence without its punctuation and predicts whether it is a question (accuracy). Each is
trained once. Then every technique continues from that model for a quarter of the steps, with its section of
`compression_training`. The row *plain* continues as long without one. Quality and size are those of the model that
`redundancy_clean` returns. One process, one thread, fp32; about three minutes of processor time. Nothing is timed.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import math
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.bert import BertConfig, BertForSequenceClassification
from transformers.models.gpt2 import GPT2Config, GPT2LMHeadModel

import deepspeed
from deepspeed.compression import compression_state, init_compression, redundancy_clean

_HERE = Path(__file__).resolve().parent
LAYERS, HEADS = 4, 4
Batch = dict[str, torch.Tensor]


@dataclass
class Task:
    """A model with its text.

    Attributes:
        name: Name in the table.
        measure: Name of the quality metric.
        make: Builds the model with a number of layers.
        batches: Yields training batches from a seed, without end.
        quality: Returns the metric of a model on held-out text.
        steps: Number of steps of the first training.
        parts: Patterns of module names by use: ``all`` (weights to quantize), ``inputs``, ``sparse``, ``rows`` and
            ``heads`` (modules to prune, and the related ones), ``layers`` and ``others`` (of a student).
    """

    name: str
    measure: str
    make: Callable[[int], torch.nn.Module]
    batches: Callable[[int], Iterator[Batch]]
    quality: Callable[[torch.nn.Module], float]
    steps: int
    parts: dict[str, Any]


# -- the tasks --------------------------------------------------------------------------------------------------------


def gpt_task(text: str, scale: float) -> Task:
    """Returns the task of predicting the next character."""
    letters = sorted(set(text))
    ids = torch.tensor([letters.index(each) for each in text])
    split, length = int(0.95 * len(ids)), 64

    def make(layers: int) -> torch.nn.Module:
        config = GPT2Config(
            n_embd=96, n_layer=layers, n_head=HEADS, vocab_size=len(letters), n_positions=length, use_cache=False,
            resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        return GPT2LMHeadModel(config)

    def batches(seed: int) -> Iterator[Batch]:
        dice = torch.Generator().manual_seed(seed)
        while True:
            starts = torch.randint(split - length, (16,), generator=dice)
            batch = torch.stack([ids[start : start + length] for start in starts.tolist()])
            yield {"input_ids": batch, "labels": batch}

    def quality(model: torch.nn.Module) -> float:
        batch = ids[split : split + 64 * length].view(64, length)
        return math.exp(float(model(input_ids=batch, labels=batch).loss))

    parts = {
        "all": ["wte", "attn", "mlp"],
        "inputs": ["attn", "mlp"],
        "sparse": ["attn", "mlp"],
        "rows": (["c_fc"], [["mlp.c_proj"]]),
        "heads": (["attn.c_proj"], [["c_attn"]]),
        "layers": "transformer.h",
        "others": ["transformer.wte", "transformer.wpe", "transformer.ln_f"],
    }
    return Task("GPT-2", "perplexity", make, batches, quality, round(320 * scale), parts)


def bert_task(text: str, scale: float) -> Task:
    """Returns the task of telling questions from other sentences, without their punctuation."""
    length = 24
    found = re.findall(r"([^.?!:;]+)([.?!])", text.replace("\n", " ").lower())
    sentences = [(re.findall(r"[a-z']+", sentence)[:length], int(mark == "?")) for sentence, mark in found]
    sentences = [sentence for sentence in sentences if len(sentence[0]) >= 3]
    counts = Counter(word for words, _ in sentences for word in words)
    known = {word: number + 2 for number, (word, _) in enumerate(counts.most_common(1500))}
    ids = torch.tensor([[known.get(word, 1) for word in words] + [0] * (length - len(words)) for words, _ in sentences])
    labels = torch.tensor([label for _, label in sentences])
    split = int(0.85 * len(ids))

    def make(layers: int) -> torch.nn.Module:
        config = BertConfig(
            hidden_size=64, num_hidden_layers=layers, num_attention_heads=HEADS, intermediate_size=256,
            vocab_size=1502, max_position_embeddings=length, hidden_dropout_prob=0, attention_probs_dropout_prob=0,
        )  # fmt: skip
        return BertForSequenceClassification(config)

    def draw(low: int, high: int, count: int, dice: torch.Generator) -> Batch:
        """Draws as many questions as other sentences from a range."""
        parts = []
        for label in (0, 1):
            places = (labels[low:high] == label).nonzero().flatten() + low
            parts.append(places[torch.randint(len(places), (count // 2,), generator=dice)])
        chosen = torch.cat(parts)
        rows = ids[chosen]
        return {"input_ids": rows, "attention_mask": (rows > 0).long(), "labels": labels[chosen]}

    def batches(seed: int) -> Iterator[Batch]:
        dice = torch.Generator().manual_seed(seed)
        while True:
            yield draw(0, split, 32, dice)

    def quality(model: torch.nn.Module) -> float:
        batch = draw(split, len(ids), 1000, torch.Generator().manual_seed(5))
        predicted = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.argmax(1)
        return float((predicted == batch["labels"]).float().mean())

    parts = {
        "all": ["word_embeddings", "encoder"],
        "inputs": ["encoder"],
        "sparse": ["encoder"],
        "rows": (["intermediate.dense"], [["layer.\\w+.output.dense"]]),
        "heads": (["attention.output.dense"], [["self.query", "self.key", "self.value"]]),
        "layers": "bert.encoder.layer",
        "others": ["bert.embeddings", "bert.pooler", "classifier"],
    }
    return Task("BERT", "accuracy", make, batches, quality, round(240 * scale), parts)


# -- the techniques ---------------------------------------------------------------------------------------------------


def _technique(shared: dict[str, Any], params: dict[str, Any], modules: list[str], **more: Any) -> dict[str, Any]:
    group = {"params": params, "modules": modules, **more}
    return {"shared_parameters": {"enabled": True, **shared}, "different_groups": {"all": group}}


def techniques(parts: dict[str, Any], steps: int) -> dict[str, dict[str, Any]]:
    """Returns the sections by name of the row. A technique with an offset starts after a tenth of the steps."""
    offset = {"schedule_offset": max(steps // 10, 1)}

    def weights(bits: int, start: int | None = None, kind: str = "symmetric", **more: Any) -> dict[str, Any]:
        shared = {**offset, "quantize_weight_in_forward": start is None, "quantization_type": kind, **more}
        params = {"start_bits": start or bits, "target_bits": bits, "quantization_period": max(steps // 30, 1)}
        return {"weight_quantization": _technique(shared, params, parts["all"])}

    def inputs(calibration: str) -> dict[str, Any]:
        shared = {**offset, "range_calibration": calibration, "quantization_type": "asymmetric"}
        return {"activation_quantization": _technique(shared, {"bits": 8}, parts["inputs"])}

    def sparse(method: str) -> dict[str, Any]:
        return {"sparse_pruning": _technique({**offset, "method": method}, {"dense_ratio": 0.5}, parts["sparse"])}

    modules, related = parts["rows"]
    rows = {"row_pruning": _technique(offset, {"dense_ratio": 0.5}, modules, related_modules=related)}
    modules, related = parts["heads"]
    shared = {**offset, "method": "l1", "num_heads": HEADS}
    heads = {"head_pruning": _technique(shared, {"dense_ratio": 0.5}, modules, related_modules=related)}
    layers = {
        "layer_reduction": {
            "enabled": True,
            "keep_number_layer": LAYERS // 2,
            "module_name_prefix": parts["layers"],
            "teacher_layer": list(range(0, LAYERS, 2)),
            "other_module_name": parts["others"],
        }
    }
    return {
        "weights in 8 bits": weights(8),
        "weights in 4 bits, asymmetric, 32 groups": weights(4, kind="asymmetric", quantize_groups=32),
        "bits falling from 8 to 4 (MoQ), 32 groups": weights(4, 8, "asymmetric", quantize_groups=32),
        "weights in 2 bits (ternary), 32 groups": weights(2, quantize_groups=32),
        "weights in 1 bit, 32 groups": weights(1, quantize_groups=32),
        "inputs in 8 bits, by token": inputs("dynamic"),
        "inputs in 8 bits, running range": inputs("static"),
        "weights and inputs in 8 bits": weights(8) | inputs("dynamic"),
        "half of the weights zero, l1": sparse("l1"),
        "half of the weights zero, learned": sparse("topk"),
        "half of the rows": rows,
        "half of the heads": heads,
        "half of the layers": layers,
        "half of rows and heads, 8 bits": rows | heads | weights(8),
    }


# -- runs -------------------------------------------------------------------------------------------------------------


@dataclass
class Row:
    """A row of the table.

    Attributes:
        name: Of the technique.
        quality: By the metric of the task.
        bytes: Of parameters and buffers.
        achieved: Bits and dense shares at the end of training.
    """

    name: str
    quality: float
    bytes: int
    achieved: str


def train(model: torch.nn.Module, task: Task, steps: int, seed: int, rate: float, **sections: Any) -> Any:
    """Trains a model and returns its engine."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": rate, "weight_decay": 0.01}},
        "zero_optimization": {"stage": 1},
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {"total_num_steps": steps, "warmup_num_steps": max(steps // 20, 2), "cos_min_ratio": 0.05},
        },
        **sections,
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)
    batches = task.batches(seed)
    for _ in range(steps):
        engine.backward(engine(**next(batches)).loss)
        engine.step()
    return engine


def size_of(model: torch.nn.Module) -> int:
    """Returns the bytes of parameters and buffers."""
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


@torch.no_grad()
def measure(task: Task, model: torch.nn.Module) -> float:
    """Returns the quality in evaluation mode."""
    return task.quality(model.eval())


def run(task: Task) -> list[Row]:
    """Runs every technique on one task; returns the rows."""
    torch.manual_seed(0)
    first = task.make(LAYERS)
    engine = train(first, task, task.steps, seed=1, rate=1.5e-3)
    state = copy.deepcopy(first.state_dict())
    rows = [Row("first training", measure(task, first), size_of(first), "")]
    engine.destroy()
    steps = max(task.steps // 4, 4)
    for name, section in {"plain": {}, **techniques(task.parts, steps)}.items():
        torch.manual_seed(1)
        base = task.make(LAYERS)
        base.load_state_dict(state)
        is_student = "layer_reduction" in section
        model = task.make(LAYERS // 2) if is_student else base
        sections = {"compression_training": section} if section else {}
        if section:
            init_compression(model, sections, teacher_model=base if is_student else None)
        engine = train(model.train(), task, steps, seed=2, rate=5e-4, **sections)
        achieved = _achieved(model)
        compressed = measure(task, model)
        clean = redundancy_clean(engine, sections) if any(compression_state(model)) else model
        quality = measure(task, clean)
        if not math.isclose(quality, compressed, rel_tol=5e-3, abs_tol=5e-3):
            sys.exit(
                f"{task.name}, {name}: expected {compressed:.4f} after redundancy_clean as before, found {quality:.4f}"
            )
        rows.append(Row(name, quality, size_of(clean), achieved))
        engine.destroy()
        print(f"{task.name:6} {name:45} {task.measure} {quality:8.3f} {size_of(clean) / 1e6:8.3f} MB  {achieved}")
    return rows


def _achieved(model: torch.nn.Module) -> str:
    """Returns the bits and the dense shares at the end of training, as text."""
    states = compression_state(model)
    found: list[str] = []
    for bits, what in (("bits", "weights"), ("activation_bits", "inputs")):
        values = sorted({getattr(state, bits) for state in states if getattr(state, bits) is not None})
        if values:
            found.append(f"{what} {', '.join(map(str, values))} bits")
    for kind in ("sparse", "row", "head"):
        shares = [state.kept[kind] for state in states if kind in state.kept]
        if shares:
            found.append(f"{kind} {sum(shares) / len(shares):.2f} dense")
    return "; ".join(found)


def report(results: dict[str, list[Row]], tasks: list[Task], args: argparse.Namespace, seconds: float) -> str:
    """Returns the tables in Markdown."""
    lines = [
        "# Compression of models",
        "",
        f"`benchmarks/compression_of_models.py --text {Path(args.text).name} --scale {args.scale:g}`, "
        f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}, one thread, {seconds:.0f} s of processor time. The docstring of the script "
        "describes the rows. Sizes are bytes of parameters and buffers after `redundancy_clean`, on disk as in memory. "
        "Accuracy is of 1,000 sentences: its standard error is about 0.012.",
    ]
    for task in tasks:
        rows = results[task.name]
        plain = next(row for row in rows if row.name == "plain")
        lines += ["", f"## {task.name}: {task.measure}, {plain.bytes / 1e6:.2f} MB", ""]
        lines += [f"| | {task.measure} | MB | of plain | at the end |", "|---|---:|---:|---:|---|"]
        lines += [
            f"| {row.name} | {row.quality:.3f} | {row.bytes / 1e6:.3f} | {row.bytes / plain.bytes:.2f} "
            f"| {row.achieved} |"
            for row in rows
        ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, help="a text of a million characters or more")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the number of steps, 0.4 or more")
    parser.add_argument("--write-report", action="store_true", help="write results/compression-of-models-DATE.md")
    args = parser.parse_args()
    torch.set_num_threads(1)
    deepspeed.utils.logging.set_log_level_from_string("error")
    text = Path(args.text).read_text(encoding="utf-8")
    tasks = [gpt_task(text, args.scale), bert_task(text, args.scale)]
    begin = time.process_time()
    results = {task.name: run(task) for task in tasks}
    written = report(results, tasks, args, time.process_time() - begin)
    print(written)
    if args.write_report:
        path = _HERE / "results" / f"compression-of-models-{datetime.date.today():%Y-%m-%d}.md"
        path.write_text(written, encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
