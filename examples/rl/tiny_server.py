"""Serves a tiny Llama with the calls of vLLM for weights, for grpo_server.py: a stand-in of one worker, over gloo.

python examples/rl/tiny_server.py 8000
"""

from __future__ import annotations

import json
import math
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

SHAPE = LlamaConfig(
    vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, use_cache=True
)


class Worker:
    """Holds the served copy of the model."""

    def __init__(self) -> None:
        self.model = LlamaForCausalLM(SHAPE).eval()
        self.buffer_bytes = 0
        self.group: Any = None

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Joins the trainer's group."""
        self.buffer_bytes, size = init_info["packed_buffer_size_bytes"], init_info["world_size"]
        store = dist.TCPStore(init_info["master_address"], init_info["master_port"], size, is_master=False)
        store = dist.PrefixStore("weight_transfer", store)
        self.group = dist.ProcessGroupGloo(store, init_info["rank_offset"], size)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receives packed buffers and writes the tensors in them into the model."""
        rows = list(zip(update_info["names"], update_info["dtype_names"], update_info["shapes"], strict=True))
        weights = dict(self.model.state_dict(keep_vars=False))
        while rows:
            taken, size = [], 0
            while rows and size <= self.buffer_bytes:
                name, dtype, shape = rows.pop(0)
                taken.append((name, getattr(torch, dtype), shape, math.prod(shape) * getattr(torch, dtype).itemsize))
                size += taken[-1][-1]
            buffer, options = torch.empty(size, dtype=torch.uint8), dist.BroadcastOptions()
            options.rootRank = 0
            self.group.broadcast([buffer], options).wait()
            parts = buffer.split([nbytes for *_, nbytes in taken])
            for (name, dtype, shape, _), data in zip(taken, parts, strict=True):
                weights[name].copy_(data.clone().view(dtype).view(shape))

    def generate(self, prompts: list[list[int]], samples: int, tokens: int, layers: bool) -> dict[str, Any]:
        """Returns responses with log-probabilities; with ``layers`` also the hidden states after each layer."""
        ids = torch.tensor(prompts).repeat_interleave(samples, 0)
        found = self.model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=True, max_new_tokens=tokens, pad_token_id=0,
            eos_token_id=None,
        )  # fmt: skip
        scored = self.model(input_ids=found, output_hidden_states=layers)
        logprobs = scored.logits[:, -tokens - 1 : -1].log_softmax(-1).gather(-1, found[:, -tokens:, None])[..., 0]
        states = [state.tolist() for state in scored.hidden_states[1:]] if layers else []
        return {"tokens": found.tolist(), "logprobs": logprobs.tolist(), "layers": states}


class Handler(BaseHTTPRequestHandler):
    """Answers the calls."""

    worker: Worker

    def do_GET(self) -> None:  # noqa: N802
        """Answers /get_world_size and /health."""
        self._answer({"world_size": 1})

    def do_POST(self) -> None:  # noqa: N802
        """Answers all other calls; those without a method of the worker need nothing here."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        action = getattr(self.worker, self.path.strip("/").partition("?")[0], None)
        with torch.no_grad():
            self._answer((action(**body) if action else None) or {})

    def _answer(self, answer: dict[str, Any]) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_: Any) -> None:
        """Logs nothing."""


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    Handler.worker = Worker()
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
