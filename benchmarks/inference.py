"""Times ``generate`` and measures its memory: the model's own, this project in every width, ZeRO-Inference.

    .venv/bin/python benchmarks/inference.py                        # 119 million parameters: about 12 minutes
    .venv/bin/python benchmarks/inference.py --write-report         # also writes benchmarks/results/inference-DATE.md
    .venv/bin/python benchmarks/inference.py --only plain-fp32,fp32 --rounds 15
    .venv/bin/python benchmarks/inference.py --layers 2 --hidden 128 --new 4 --rounds 1   # does it run?

Every contestant has processes of its own, one thread per rank. They take turns, in a new order each round, so that
other load of the machine affects all alike. A turn is one ``generate`` that is not counted, because the caches have the
data of the contestant before, and one that is. All have the same weights and prompt; contestants with the same digest
have generated the same tokens. Ratios are medians over the ratios of single rounds.

- ``plain-*``: the model's own ``generate``. ``fp32``, ``bf16``, ``int8``, ``int4``: ``deepspeed.init_inference``.
- ``tp2-*``: two ranks share every layer.
- ``host-*``, ``file-*``: ZeRO-Inference, weights in host memory or files, one layer in use.
- ``accelerate-host``, ``accelerate-file``: Accelerate's offload, as ``device_map`` dispatches it, in bf16.
- ``cold-*``: from files that are not in the page cache, as on a machine whose memory is too small for the model: the
  cache is dropped before every forward, and ours reads with direct access. For ``file-*`` the files are in the cache.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from contest.process_memory import status_bytes
from contest.turns import Contestant, answer, requests

ROOT = Path(__file__).resolve().parents[1]
FOUR = {"weight": {"num_bits": 4}}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain-fp32": {},
    "plain-bf16": {},
    "fp32": {"dtype": "fp32"},
    "bf16": {"dtype": "bf16"},
    "int8": {"dtype": "int8"},
    "int4": {"dtype": "int8", "quant": FOUR},
    "tp2-fp32": {"dtype": "fp32", "tensor_parallel": {"tp_size": 2}},
    "tp2-bf16": {"dtype": "bf16", "tensor_parallel": {"tp_size": 2}},
    "tp2-int8": {"dtype": "int8", "tensor_parallel": {"tp_size": 2}},
    "host-bf16": {"dtype": "bf16", "zero": "cpu"},
    "host-int8": {"dtype": "int8", "zero": "cpu"},
    "host-int4": {"dtype": "int8", "quant": FOUR, "zero": "cpu"},
    "accelerate-host": {},
    "file-bf16": {"dtype": "bf16", "zero": "nvme"},
    "file-int8": {"dtype": "int8", "zero": "nvme"},
    "file-int4": {"dtype": "int8", "quant": FOUR, "zero": "nvme"},
    "accelerate-file": {},
    "cold-bf16": {"dtype": "bf16", "zero": "nvme"},
    "cold-accelerate": {},
}
# (contestant, the one beside it, least ratio of their tokens per second; None: shown without a goal)
GOALS = (
    ("fp32", "plain-fp32", 1 / 1.02),
    ("bf16", "plain-bf16", 1 / 1.02),
    ("int8", "bf16", 1.4),
    ("int4", "bf16", None),
    ("tp2-fp32", "fp32", None),
    ("tp2-bf16", "bf16", None),
    ("host-bf16", "accelerate-host", 1.0),
    ("file-bf16", "accelerate-file", 1.0),
    ("cold-bf16", "cold-accelerate", 1.0),
    ("file-int8", "file-bf16", None),
    ("file-int4", "file-bf16", None),
)


# -- one contestant: a process that generates at each request --------------------------------------------------


def work(name: str, shape: dict[str, int], rank: int, rendezvous: str) -> None:
    """Answers each request with seconds, processor seconds, the digest of the tokens, and bytes.

    The bytes are those of the weights in memory, and the growth of the process since the imports.
    """
    import torch
    import transformers

    import deepspeed  # noqa: F401 - so that its import counts for no contestant

    torch.set_num_threads(1)
    if name.startswith("tp2"):
        torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    tiny = model_of({**shape, "hidden": 64, "inner": 64, "layers": 1}, transformers, torch)
    tiny.generate(torch.ones(1, 4, dtype=torch.long), max_new_tokens=2, do_sample=False)  # imports modules
    before, folder = status_bytes("VmRSS"), f"{rendezvous}-files"
    model, nbytes = build(name, model_of(shape, transformers, torch), folder)
    if name.startswith("cold"):
        module = getattr(model, "module", model)
        module.register_forward_pre_hook(lambda *_: drop_cached(folder), prepend=True)  # before it reads
    ids = torch.arange(3, 3 + shape["prompt"]).view(1, -1) % shape["vocabulary"]
    options = {"max_new_tokens": shape["new"], "min_new_tokens": shape["new"], "do_sample": False}
    for _ in requests():
        wall, cpu = time.perf_counter(), time.process_time()
        with torch.no_grad():
            tokens = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        seconds = time.perf_counter() - wall, time.process_time() - cpu
        digest = hashlib.sha1(bytes(str(tokens.tolist()), "ascii")).hexdigest()[:6]
        answer(*seconds, digest, nbytes, status_bytes("VmRSS") - before)


def drop_cached(folder: str) -> None:
    """Drops the files below ``folder`` from the page cache."""
    for path in Path(folder).rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.fdatasync(handle)  # pages that are not written yet would stay
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def model_of(shape: dict[str, int], transformers: Any, torch: Any) -> Any:
    """Returns a Llama with the same weights in every process."""
    torch.manual_seed(0)
    hidden = shape["hidden"]
    config = transformers.LlamaConfig(
        hidden_size=hidden,
        intermediate_size=shape["inner"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=hidden // 64,
        vocab_size=shape["vocabulary"],
        max_position_embeddings=1024,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return transformers.LlamaForCausalLM(config).eval().requires_grad_(False)


def build(name: str, model: Any, folder: str) -> tuple[Any, int]:
    """Returns the contestant's model, and the bytes of weights that this process keeps in memory between calls."""
    import gc

    import torch

    import deepspeed

    def nbytes(module: Any) -> int:
        return sum(t.nbytes for t in (*module.parameters(), *module.buffers()) if not t.is_meta)

    if name.startswith("plain"):
        made: Any = model if name == "plain-fp32" else model.to(torch.bfloat16)
        return made, nbytes(made)
    if "accelerate" in name:
        import accelerate

        model.to(torch.bfloat16)
        size = nbytes(model)
        if name == "accelerate-host":
            accelerate.cpu_offload(model, execution_device="cpu")
            return model, size
        accelerate.disk_offload(model, folder, execution_device="cpu")
        gc.collect()
        return model, nbytes(model)
    settings = dict(SETTINGS[name])
    if (device := settings.pop("zero", None)) is not None:
        offload: dict[str, Any] = {"device": device}
        if device == "nvme":
            offload |= {"nvme_path": folder, "max_in_cpu": 0} | ({"page_cache": False} if "cold" in name else {})
        settings["zero"] = {"stage": 3, "offload_param": offload}
    made = deepspeed.init_inference(model, settings)
    if device is None:
        return made, nbytes(made.module)
    from deepspeed.zero.storage import Tier

    memory_tracker = made._runner[0]._runtime.memory_tracker
    return made, memory_tracker.live_at(Tier.DEVICE) + memory_tracker.live_at(Tier.HOST)


# -- the contest -------------------------------------------------------------------------------------------------------


def contest(shape: dict[str, int], names: list[str], rounds: int) -> str:
    """Runs the contestants and returns the tables of speed and memory, and of ratios."""
    times: dict[str, list[float]] = {name: [] for name in names}
    processor: dict[str, list[float]] = {name: [] for name in names}
    last: dict[str, tuple[str, int, int]] = {}
    with tempfile.TemporaryDirectory(prefix="inference-") as folder:
        contestants = {
            name: Contestant(__file__, name, shape, 2 if name.startswith("tp2") else 1, folder) for name in names
        }
        for name in names:
            contestants[name].turn()  # waits until it is built
        for _ in range(rounds):
            for name in random.sample(names, len(names)):
                contestants[name].turn()
                rows = contestants[name].turn()
                wall, cpu, nbytes, grown = (max(row[column] for row in rows) for column in (0, 1, 3, 4))
                times[name].append(wall)
                processor[name].append(cpu)
                last[name] = rows[0][2], nbytes, grown
        for contestant in contestants.values():
            contestant.end()
    lines = ["| | tokens/s | fastest | processor ms per token | weights MB | resident MB | tokens |"]
    lines.append("|---|---|---|---|---|---|---|")
    new = shape["new"]
    for name in names:
        digest, nbytes, grown = last[name]
        median, fastest = new / statistics.median(times[name]), new / min(times[name])
        cpu = 1e3 * statistics.median(processor[name]) / new
        lines.append(
            f"| {name} | {median:.1f} | {fastest:.1f} | {cpu:.1f} | {nbytes / 1e6:.0f} | {grown / 1e6:.0f} | {digest} |"
        )
    lines += ["", "| tokens/s of | beside | ratio | quartiles | processor | goal |", "|---|---|---|---|---|---|"]
    for one, other, goal in GOALS:
        if one not in times or other not in times:
            continue
        ratios = sorted(b / a for a, b in zip(times[one], times[other], strict=True))
        low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
        cpu = statistics.median(processor[other]) / statistics.median(processor[one])
        shown = "" if goal is None else f"at least {goal:.2f}"
        middle = statistics.median(ratios)
        lines.append(f"| {one} | {other} | {middle:.3f} | {low:.3f} to {high:.3f} | {cpu:.3f} | {shown} |")
    return "\n".join(lines)


def main() -> None:
    if sys.argv[1:2] == ["--work"]:
        name, shape, rank, rendezvous = sys.argv[2:6]
        work(name, json.loads(shape), int(rank), rendezvous)
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--inner", type=int, help="width of the gated layers; default 2.75 x hidden")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--prompt", type=int, default=16, help="tokens of the prompt")
    parser.add_argument("--new", type=int, default=24, help="generated tokens")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", help="contestants, separated by commas")
    parser.add_argument("--write-report", action="store_true")
    options = parser.parse_args()
    shape = {key: getattr(options, key) for key in ("hidden", "layers", "vocabulary", "prompt", "new")}
    shape["inner"] = options.inner or 11 * options.hidden // 4 // 64 * 64
    names = [name for name in SETTINGS if not options.only or name in options.only.split(",")]
    started = time.monotonic()
    tables = contest(shape, names, options.rounds)
    minutes = (time.monotonic() - started) / 60
    text = f"Llama shape {shape}, {options.rounds} rounds, one thread per rank, {minutes:.1f} minutes\n\n{tables}\n"
    print(text)
    if options.write_report:
        import torch
        import transformers

        today = datetime.datetime.now(tz=datetime.timezone.utc).date()
        head = (
            f"# Generating tokens, {today}\n\n`benchmarks/inference.py`, torch {torch.__version__}, Transformers "
            f"{transformers.__version__}, {os.cpu_count()} cores ({torch.backends.cpu.get_cpu_capability()}).\n\n"
        )
        (ROOT / f"benchmarks/results/inference-{today}.md").write_text(head + text)


if __name__ == "__main__":
    main()
