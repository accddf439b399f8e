"""Trains a tiny Llama by GRPO on responses of a separate server, which gets the weights after each update.

    torchrun --nproc-per-node 2 examples/rl/grpo_server.py
    torchrun --nproc-per-node 2 examples/rl/grpo_server.py --per-layer --bf16

The server is tiny_server.py, which rank 0 starts; its calls for weights are those of vLLM. At the end it prints how far
the trainer and the served copy are apart: the greatest gap of the log-probabilities of responses, and with
``--per-layer`` that of the hidden states after each layer. The reward is the share of even tokens in a response.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import torch
from tiny_server import SHAPE
from transformers import LlamaForCausalLM

import deepspeed
from deepspeed.ports import free_port, is_listening
from deepspeed.rollout import ServerClient
from deepspeed.sequence.vocab_parallel_ops import vocab_parallel_logprobs

PROMPTS, SAMPLES, TOKENS, CLIP = 4, 8, 8, 0.2


def start_server(port: int) -> subprocess.Popen[bytes]:
    """Starts a server on this machine, which takes seconds to listen."""
    return subprocess.Popen([sys.executable, str(Path(__file__).with_name("tiny_server.py")), str(port)])


def ask(url: str, **body: Any) -> dict[str, torch.Tensor]:
    """Returns the responses that the server generates for the prompts."""
    request = urllib.request.Request(f"{url}/generate", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as answer:
        return {name: torch.tensor(values) for name, values in json.load(answer).items()}


def greatest(gap: torch.Tensor) -> float:
    """Returns the greatest magnitude over all ranks."""
    found = gap.abs().max()
    deepspeed.comm.all_reduce(found, deepspeed.comm.ReduceOp.MAX)
    return float(found)


def main() -> None:
    """Trains by GRPO: each step gets responses from the server, updates, and sends it the new weights."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, default=3, help="ZeRO stage")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--bf16", action="store_true", help="train in bf16; the server computes in fp32")
    parser.add_argument("--per-layer", action="store_true", help="print the gap after each layer")
    parser.add_argument("--report", default=None, help="folder for the run report")
    parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", "0")))
    arguments = parser.parse_args()
    port = free_port()
    server = start_server(port) if int(os.environ.get("RANK", "0")) == 0 else None
    torch.manual_seed(1)  # not the server's seed: its first weights are others
    config = {
        "train_micro_batch_size_per_gpu": PROMPTS * SAMPLES,
        "optimizer": {"type": "AdamW", "params": {"lr": 5e-3}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": arguments.stage, "stage3_param_persistence_threshold": 0},
        "bf16": {"enabled": arguments.bf16},
        "run_report": {"path": arguments.report},
    }
    engine, *_ = deepspeed.initialize(model=LlamaForCausalLM(SHAPE), config=config)
    ports = torch.tensor([port])
    deepspeed.comm.broadcast(ports, 0)
    url = f"http://127.0.0.1:{int(ports)}"
    while not is_listening("127.0.0.1", int(ports)):
        time.sleep(0.1)
    client = ServerClient(engine, url, transport="gloo", timeout=60)
    torch.manual_seed(1 + engine.global_rank)
    seen = []
    for _ in range(arguments.steps):
        with engine.sleep(keep=("lp_params",)):  # while weights leave and the server generates
            client.send()
            prompts = torch.randint(1, SHAPE.vocab_size, (PROMPTS, 4)).tolist()
            found = ask(url, prompts=prompts, samples=SAMPLES, tokens=TOKENS, layers=arguments.per_layer)
        ids, theirs = found["tokens"].to(engine.device), found["logprobs"].to(engine.device)
        rewards = (ids[:, -TOKENS:] % 2 == 0).float().mean(1)
        groups = rewards.view(PROMPTS, SAMPLES)
        advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).view(-1, 1)
        output = engine(input_ids=ids, output_hidden_states=arguments.per_layer)
        own = vocab_parallel_logprobs(output.logits[:, -TOKENS - 1 : -1], ids[:, -TOKENS:])
        ratio = (own - theirs).exp()  # the served copy sampled, so its probabilities count
        engine.backward(-torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages).mean())
        engine.step()
        gap = greatest(own.detach() - theirs)
        layers = zip(output.hidden_states[1:], found["layers"], strict=True) if arguments.per_layer else ()
        layer_gaps = [greatest(state.detach().float() - their.to(engine.device)) for state, their in layers]
        mean = rewards.mean()
        deepspeed.comm.all_reduce(mean)
        seen.append(float(mean) / deepspeed.comm.get_world_size())
    client.close()
    if server is not None:
        server.terminate()
        print(f"greatest gap of log-probabilities {gap:.1e}")
        for number, layer_gap in enumerate(layer_gaps):
            print(f"layer {number} {layer_gap:.1e}")
    engine.destroy()
    if engine.global_rank == 0:
        print(f"reward {seen[0]:.4f} -> {seen[-1]:.4f}")


if __name__ == "__main__":
    main()
