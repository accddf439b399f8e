"""Shapes that are not worked out twice: a plan is the same with and without, to the byte."""

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.nested import tensors_of
from deepspeed.plan import DecoderShape, values
from deepspeed.plan.values import KnownShapes
from deepspeed.torch_private import storage_key

SHAPE = DecoderShape(layers=4, hidden=64, heads=4, vocab=128, kv_heads=2)
HOST = {"device": "cpu", "pin_memory": True}


class Mixed(nn.Module):
    """Dropout, convolutions, buffers that are written, work in place, a tied weight, a module that is called twice."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(40, 32)
        self.mix = nn.Conv1d(32, 32, 3, padding=1)
        self.norm = nn.BatchNorm1d(32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(32, 40, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        x = self.embedding(ids)
        for _ in range(2):
            x = self.norm(self.mix(x.transpose(1, 2))).transpose(1, 2)
        x = self.blocks(x.add_(1).relu_()).reshape(-1, 32)
        return nn.functional.cross_entropy(self.head(x[1:]).float(), ids.flatten()[:-1])


def mixed():
    return Mixed(), lambda samples, tokens: torch.zeros(samples, tokens, dtype=torch.int64)


def llama():
    transformers = pytest.importorskip("transformers")
    return transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4, vocab_size=100
    )


CASES = {
    "stage 1, dropout": (mixed, {"stage": 1}, {}, {}),
    "stage 3, dropout, fp32, processors": (
        mixed,
        {"stage": 3},
        {"bf16": {"enabled": False}},
        {"device": "cpu", "device_memory": "1GB"},
    ),
    "stage 3, checkpointing": (SHAPE, {"stage": 3}, {}, {"activation_checkpointing": True}),
    "stage 2, offload": (SHAPE, {"stage": 2, "offload_optimizer": HOST}, {"gradient_accumulation_steps": 3}, {}),
    "stage 3, offload, checkpointing, transformers": (
        llama,
        {"stage": 3, "offload_optimizer": HOST, "offload_param": HOST, "stage3_param_persistence_threshold": 0},
        {},
        {"activation_checkpointing": True},
    ),
}
DEFAULT = ("stage 1, dropout", "stage 3, checkpointing", "stage 2, offload")


@pytest.mark.parametrize(
    "case", [*DEFAULT, *(pytest.param(c, marks=pytest.mark.slow) for c in CASES if c not in DEFAULT)]
)
def test_a_plan_is_the_same_with_and_without(case, monkeypatch):
    model, zero, more, options = CASES[case]
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": zero,
        **more,
    }
    worked_out = []
    count = values.arithmetic_of
    monkeypatch.setattr(values, "arithmetic_of", lambda *call: worked_out.append(call[0]) or count(*call))

    def planned():
        worked_out.clear()
        given = model() if model is llama else model
        made = deepspeed.plan(given, config, devices_per_node=4, sequence_length=32, suggest=False, **options)
        return made.to_dict(), made.simulated, len(worked_out)

    result, found, operations = planned()
    monkeypatch.setattr(KnownShapes, "is_used", False)
    result_without, found_without, operations_without = planned()
    assert result == result_without
    assert found == found_without
    assert operations < operations_without


def test_what_is_not_provably_alike_is_worked_out():
    ran = []
    shapes = KnownShapes(lambda func, *_: ran.append(func) or 0)
    aten = torch.ops.aten

    def twice(func, *args):
        ran.clear()
        results = [shapes.run(func, args, {})[0] for _ in range(2)]
        return results, len(ran)

    x = torch.empty(4, 6, device="meta")
    (one, two), times = twice(aten.mul.Tensor, x, x.t().contiguous().t())
    assert times == 1
    assert (one.shape, one.stride(), one.dtype) == (two.shape, two.stride(), two.dtype)
    assert storage_key(one) != storage_key(two)
    assert twice(aten.mul.Tensor, x, 2)[1] == 1
    assert twice(aten.mul.Tensor, x, 2.0)[1] == 1, "2 is not 2.0: they promote differently"
    assert all(result is x for result in twice(aten.add_.Tensor, x, 1)[0])
    for func, *args in ((aten.view.default, x, [24]), (aten._unsafe_view.default, x, [24]), (aten.split.Tensor, x, 2)):
        for result in tensors_of(twice(func, *args)[0]):
            assert result is not x and storage_key(result) == storage_key(x), func
    for func, *args in (
        (aten.mul.Tensor, x, torch.empty((), device="meta")),  # a number of Python, or not
        (aten.mul.Tensor, torch.empty(3), 2),  # has values
        (aten.mul.Tensor, x.to(torch.complex64).conj(), 2),
        (aten.resize_.default, torch.empty(3, device="meta"), [3]),
    ):
        assert twice(func, *args)[1] == 2, func
