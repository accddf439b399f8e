"""engine.export_weights: full tensors by name out of any cut, and what a copy computes from them."""

import copy
import weakref

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import deepspeed
from tests.ecosystem.support import needs_transformers
from tests.engine.support import engine_of
from tests.harness import on_ranks
from tests.harness.toy_models import causal_model

SIZES = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "num_local_experts": 4,
}  # fmt: skip
AXES = [
    {"zero_optimization": {"stage": 0}},
    {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}},
    {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}},
    {"zero_optimization": {"stage": 1}, "tensor_parallel": {"autotp_size": 2}},
    {"zero_optimization": {"stage": 3}, "expert_parallel": {"enabled": True, "autoep_size": 2}},
]


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that were made inside and still live, and the most at any operation."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self._seen = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = {self._key(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta":
                self._count(leaf, before)
        return out

    @staticmethod
    def _key(tensor):
        return tensor.untyped_storage()._cdata

    def _count(self, tensor, before):
        storage = tensor.untyped_storage()
        if storage._cdata in self._seen or storage._cdata in before:
            return
        self._seen[storage._cdata] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, storage._cdata)

    def _gone(self, key):
        self.now -= self._seen.pop(key)


@needs_transformers
@on_ranks(2)
def test_no_more_than_one_tensor_is_gathered_at_a_time() -> None:
    """Only the tensor that is gathered and its copy live while the model is exported."""
    for more in AXES:
        model = causal_model("Mixtral", seed=1, **{**SIZES, "num_hidden_layers": 8})
        config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, **more}
        sizes = [4 * parameter.numel() for parameter in model.parameters()]
        engine = deepspeed.initialize(model=model, config=config)[0]
        with _LiveBytes() as live:
            for _, value in engine.export_weights(bucket_bytes=1):
                del value
        # Of a tensor that is cut, its parts lie beside the whole and its copy; ranks tell each other what they have.
        assert live.peak <= 3 * max(sizes) + 4096 < sum(sizes) / 4, (more, live.peak, max(sizes))
        engine.destroy()


@on_ranks(2)
def test_exported_tensors_are_copies() -> None:
    """All tensors are kept, and then written into."""
    for stage in (0, 3):
        model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
        known = {name: value.clone() for name, value in model.state_dict().items()}
        engine = engine_of(model, stage, zero={"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 40})
        kept = dict(engine.export_weights())
        for name, value in kept.items():
            assert torch.equal(value, known[name]), name
            value.zero_()
        for name, value in engine.export_weights():
            assert torch.equal(value, known[name]), name
        assert len(kept) == (0 if dist.get_rank() else len(known))
        engine.destroy()


@needs_transformers
@on_ranks(2)
def test_full_weights_come_out_of_every_cut() -> None:
    for more in AXES:
        torch.manual_seed(0)
        model = causal_model("Mixtral", seed=1, **SIZES, tie_word_embeddings=more is AXES[0])
        served = copy.deepcopy(model)
        config = {
            "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}, **more,
        }  # fmt: skip
        engine = deepspeed.initialize(model=model, config=config)[0]
        tokens = torch.arange(18).view(2, 9)
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
        engine.eval()
        with torch.no_grad():
            trained = engine(input_ids=tokens).logits.float().log_softmax(-1)
        known = {name: value.shape for name, value in served.state_dict().items()}
        names = []
        for name, value in engine.export_weights(dtype=torch.float32):
            assert value.shape == known[name] and value.dtype == torch.float32
            served.load_state_dict({name: value}, strict=False)
            names.append(name)
        if dist.get_rank() == 0:
            tied = {"lm_head.weight"} if more is AXES[0] else set()
            assert len(names) == len(set(names)) and set(names) == known.keys() - tied
            with torch.no_grad():
                found = served.eval()(input_ids=tokens).logits.log_softmax(-1)
            tolerance = 0.05 if "bf16" in more else 1e-5
            torch.testing.assert_close(found, trained, rtol=tolerance, atol=tolerance)
        else:
            assert not names
        engine.destroy()
