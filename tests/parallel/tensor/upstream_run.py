"""Trains a small Llama that the original package cuts over tensor-parallel ranks, and saves it: makes the fixtures.

    python tests/parallel/tensor/upstream_run.py PYTHON [NAME ...]

PYTHON is an interpreter that has the original package and transformers. The same file is what its ranks run.
"""

import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent / "fixtures"
FIXTURES = {"tensor2-stage1": (2, 1, True), "tensor2x2-stage3": (4, 3, False)}
"""Ranks, stage, and whether it is converted to the universal layout too; two ranks share a layer."""
SIZES = {
    "vocab_size": 19, "hidden_size": 12, "intermediate_size": 13, "num_hidden_layers": 1, "num_attention_heads": 3,
    "num_key_value_heads": 3, "head_dim": 4, "max_position_embeddings": 16, "attention_bias": True, "mlp_bias": True,
    "attn_implementation": "eager", "tie_word_embeddings": False,
}  # fmt: skip


def model() -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def loss_of(engine: Any, step: int, data: int) -> Any:
    import torch

    ids = torch.randint(0, 19, (2, 7), generator=torch.Generator().manual_seed(100 * step + data))
    return engine(input_ids=ids, labels=ids).loss


def config(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": True},
        "tensor_parallel": {"autotp_size": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-5, "torch_adam": True, "weight_decay": 0.1}},
    }


def _rank(folder: str, stage: int) -> None:
    import torch

    import deepspeed

    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    engine = deepspeed.initialize(model=model(), config=config(stage))[0]
    losses = []
    for step in range(6):
        loss = loss_of(engine, step, int(os.environ["RANK"]) // 2)
        losses.append(float(loss))
        if step == 3:  # the next losses are what whoever loads it must see
            engine.save_checkpoint(folder, tag="tag")
            whole = engine._consolidated_16bit_state_dict() or {}
            held = {name: value.float().flatten().tolist() for name, value in whole.items()}
        engine.backward(loss)
        engine.step()
    if os.environ["RANK"] == "0":
        Path(folder, "weights.json").write_text(json.dumps(held))
    Path(folder, f"losses{os.environ['RANK']}.json").write_text(json.dumps(losses))


def _make(python: str, name: str, port: int) -> None:
    ranks, stage, is_converted = FIXTURES[name]
    with tempfile.TemporaryDirectory() as folder:
        shared = {**os.environ, "PYTHONPATH": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        shared |= {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        running = [
            subprocess.Popen(
                [python, __file__, "rank", folder, str(stage)],
                env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                cwd=folder,
            )
            for rank in range(ranks)
        ]
        codes = [process.wait() for process in running]
        if any(codes):
            raise SystemExit(f"{name}: failed")
        arguments = ["--input_folder", f"{folder}/tag", "--output_folder", f"{folder}/tag_universal"]
        workers = ["--num_extract_workers", "1", "--num_merge_workers", "1"]
        convert = [python, "-m", "deepspeed.checkpoint.ds_to_universal", *arguments, *workers]
        if is_converted:
            subprocess.run(convert, check=True, env=shared, cwd=folder)
        with zipfile.ZipFile(HERE / f"{name}.zip", "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
            for path in sorted(Path(folder).rglob("*")):
                if path.is_file() and path.parent != Path(folder) or path.suffix == ".json":
                    archive.write(path, path.relative_to(folder))


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        sys.path.pop(0)  # the folder of this file
        _rank(sys.argv[2], int(sys.argv[3]))
    else:
        for number, fixture in enumerate(sys.argv[2:] or FIXTURES):
            _make(sys.argv[1], fixture, 29830 + number)
