"""``batch_invariant``: bits of log-probabilities alone, in batches, at other places, padded; what it refuses."""

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.errors import DeepSpeedConfigError, NotYetSupportedError
from deepspeed.fast_path.batch_invariant import TILE, tiled_attention, tiled_product
from deepspeed.sequence.vocab_parallel_ops import vocab_parallel_logprobs
from tests.ecosystem.support import needs_transformers
from tests.harness import on_ranks
from tests.harness.toy_models import causal_model, tiny_gpt

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "batch_invariant": True,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_products(dtype):
    torch.manual_seed(0)
    rows, weight = torch.randn(2 * TILE + 5, 33, dtype=dtype), torch.randn(65, 33, dtype=dtype).t()
    whole = tiled_product(rows, weight)
    torch.testing.assert_close(whole, rows @ weight)
    for start in range(0, TILE + 4, 3):
        for count in (1, 2, TILE):
            assert torch.equal(tiled_product(rows[start : start + count], weight), whole[start : start + count])


@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_in_tiles(is_causal):
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 3, 45, 8) for _ in range(3))
    mask = None if is_causal else torch.rand(2, 1, 45, 45) < 0.7
    found = tiled_attention(query, key, value, mask, is_causal, 0.3)
    plain = nn.functional.scaled_dot_product_attention(query, key, value, mask, is_causal=is_causal, scale=0.3)
    torch.testing.assert_close(found, plain)


def _logprobs(engine, ids, lengths):
    mask = (torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]).long()
    logits = engine(input_ids=ids, attention_mask=mask).logits
    return vocab_parallel_logprobs(logits[:, :-1], ids[:, 1:]), logits


@needs_transformers
@on_ranks(2)
def test_log_probabilities(rank):
    llama = causal_model(
        hidden_size=36, intermediate_size=50, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
        vocab_size=101,
    )  # fmt: skip
    for model, vocabulary in ((llama, 101), (tiny_gpt(), 20)):
        engine = deepspeed.initialize(model=model, config=CONFIG)[0]
        engine.eval()
        torch.manual_seed(rank)
        longest = 16 if vocabulary == 20 else 70
        lengths = [5, 13, longest - 20 if longest > 20 else 9, longest - 1]
        samples = [torch.randint(vocabulary, (length,)) for length in lengths]
        for inside in (torch.no_grad, torch.inference_mode):
            with inside():
                alone = [_logprobs(engine, one[None], [len(one)])[0][0] for one in samples]
                for order in ([0, 1, 2, 3], [3, 1, 0, 2, 2, 0, 1, 3], [2, 0, 1]):
                    width = max(lengths[one] for one in order) + (order[0] == 3)
                    ids = torch.zeros(len(order), width, dtype=torch.long)
                    for row, one in enumerate(order):
                        ids[row, : lengths[one]] = samples[one]
                    found, _ = _logprobs(engine, ids, [lengths[one] for one in order])
                    for row, one in enumerate(order):
                        assert torch.equal(found[row, : lengths[one] - 1], alone[one]), (order, row)
        engine.train()
        trained, logits = _logprobs(engine, samples[1][None], [13])
        assert torch.equal(trained[0], alone[1])
        engine.backward(-trained.mean())
        engine.step()
        assert all(value.isfinite().all() for _, value in engine.export_weights(ranks="all"))
        engine.destroy()


@needs_transformers
@on_ranks(2)
def test_training_follows_torch():
    def updated(config):
        model = causal_model(
            hidden_size=36, intermediate_size=50, num_hidden_layers=1, num_attention_heads=6, vocab_size=31
        )
        engine = deepspeed.initialize(model=model, config=config)[0]
        ids = torch.arange(24).view(2, 12)
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
        weights = dict(engine.export_weights(ranks="all"))
        engine.destroy()
        return weights

    plain = updated({key: value for key, value in CONFIG.items() if key != "batch_invariant"})
    for name, value in updated(CONFIG).items():
        torch.testing.assert_close(value, plain[name])


@on_ranks(1)
def test_what_cannot_be_covered_is_refused():
    class Convolved(nn.Sequential):
        pass

    engine = deepspeed.initialize(model=Convolved(nn.Conv1d(2, 2, 3)), config={**CONFIG, "zero_optimization": {}})[0]
    with pytest.raises(NotYetSupportedError, match="calls torch's convolution"):
        engine(torch.zeros(1, 2, 8))
    engine.destroy()
    with pytest.raises(DeepSpeedConfigError, match="batch_invariant with compile"):
        deepspeed.initialize(model=nn.Linear(2, 2), config={**CONFIG, "compile": {"enabled": True}})
