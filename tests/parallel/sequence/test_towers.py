"""Vision-language and encoder-decoder models by configuration: towers whole, decoders cut, equal to plain torch."""

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist

import deepspeed
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPDataLoaderAdapter
from deepspeed.sequence import mean_loss
from tests.harness import on_ranks
from tests.harness.pool import run_ranks

transformers = pytest.importorskip("transformers")

STEPS = 4
TEXT = {
    "vocab_size": 40, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def _llava() -> Any:
    vision = transformers.CLIPVisionConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4
    )
    text = transformers.LlamaConfig(**TEXT)
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=39)
    return transformers.LlavaForConditionalGeneration(config)


def _qwen() -> Any:
    rope = {"rope_type": "default", "mrope_section": [1, 1, 1], "rope_theta": 1e4}
    vision = {
        "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4,
        "temporal_patch_size": 1, "out_hidden_size": 24, "window_size": 16, "fullatt_block_indexes": [1],
    }  # fmt: skip
    config = transformers.Qwen2_5_VLConfig(
        text_config={**TEXT, "rope_parameters": rope}, vision_config=vision, image_token_id=39, video_token_id=38,
        vision_start_token_id=37, vision_end_token_id=36, tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def _idefics() -> Any:
    vision = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
        "patch_size": 4,
    }  # fmt: skip
    text = {**TEXT, "model_type": "llama", "num_hidden_layers": 1, "pad_token_id": 0}
    config = transformers.Idefics3Config(text_config=text, vision_config=vision, image_token_id=39, scale_factor=2)
    return transformers.Idefics3ForConditionalGeneration(config)


def _clip() -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {**sizes, "image_size": 8, "patch_size": 4}
    return transformers.CLIPModel(transformers.CLIPConfig(text_config=sizes, vision_config=vision, projection_dim=8))


def _bart() -> Any:
    config = transformers.BartConfig(
        vocab_size=40, d_model=24, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=40, decoder_ffn_dim=40, max_position_embeddings=64, dropout=0.0,
        attention_dropout=0.0, activation_dropout=0.0,
    )  # fmt: skip
    return transformers.BartForConditionalGeneration(config)


MODELS = {"llava": _llava, "qwen": _qwen, "idefics": _idefics, "clip": _clip, "bart": _bart}


def _model(name: str) -> Any:
    torch.manual_seed(0)
    return MODELS[name]()


def _batch(name: str, number: int) -> dict[str, torch.Tensor]:
    """Two samples; the images lie in both halves of the sequence, at other places in each sample.

    For Llava every second batch is text only.
    """
    made = torch.Generator().manual_seed(number)
    tokens = torch.randint(3, 36, (2, 13), generator=made)
    if name == "bart":
        return {"input_ids": tokens, "labels": tokens[:, :8].contiguous()}
    mask = torch.ones_like(tokens)
    mask[1, 11:] = 0
    is_text = name == "llava" and number % 2 == 1
    for row in range(0 if is_text else 2):
        first = 3 + row + number % 3
        tokens[row, first - 1], tokens[row, first : first + 4], tokens[row, first + 4] = 37, 39, 36
    labels = tokens.masked_fill((tokens >= 36) | (mask == 0), -100)
    batch = {"input_ids": tokens, "attention_mask": mask, "labels": labels}
    if is_text:
        return batch
    if name == "llava":
        return {**batch, "pixel_values": torch.randn(2, 3, 8, 8, generator=made)}
    if name == "idefics":
        return {**batch, "pixel_values": torch.randn(2, 1, 3, 16, 16, generator=made)}
    return {
        **batch,
        "pixel_values": torch.randn(32, 48, generator=made),
        "image_grid_thw": torch.tensor([[1, 4, 4], [1, 4, 4]]),
        "mm_token_type_ids": (tokens == 39).int(),
    }


def _plain(name: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = _model(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for number in range(STEPS):
        loss = model(**_batch(name, number), use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {key: value.detach().clone() for key, value in model.named_parameters()}


@cache
def _expected(name: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    return run_ranks(_plain, 1, name)[0]


def _engine(name: str, stage: int, **more: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **more,
    }
    engine, *_ = deepspeed.initialize(model=_model(name), config=config)
    return engine


def _by_sequence(name: str, stage: int) -> Any:
    engine = _engine(name, stage, sequence_parallel_size=2)
    group, rank = engine.get_sequence_parallel_group(), dist.get_rank()
    loader = [_batch(name, number) for number in range(rank, STEPS, 2)]  # ranks take turns in bringing a batch
    losses = []
    for batch in UlyssesSPDataLoaderAdapter(loader, rank, group, 2, engine.device):
        labels = batch.pop("shift_labels")
        logits = engine(**batch, use_cache=False).logits
        assert logits.size(1) == 7  # of 13, padded
        each = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss = mean_loss(each, labels, group)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    tower = next(
        module
        for key, module in engine.module.named_modules()
        if key.endswith(("vision_tower", "visual", "vision_model"))
    )
    assert tower.config._attn_implementation == "sdpa"
    return losses, {key: value.clone() for key, value in engine.iter_full("fp32")}


def _by_tensor(name: str) -> Any:
    engine = _engine(name, 1, tensor_parallel={"autotp_size": 2})
    losses = []
    for number in range(STEPS):
        loss = engine(**_batch(name, number), use_cache=False).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    shapes = {key: tuple(value.shape) for key, value in engine.module.named_parameters()}
    return losses, shapes, {key: value.clone() for key, value in engine.iter_full("fp32")}


def _assert_weights_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, value in found.items():
        torch.testing.assert_close(value, expected[key], rtol=1e-5, atol=2e-6, msg=lambda text, key=key: key + text)


@pytest.mark.parametrize(("name", "stage"), [("llava", 1), ("qwen", 3), ("idefics", 0)])
def test_cut_by_sequence(name, stage):
    losses, weights = _expected(name)
    for found, values in run_ranks(_by_sequence, 2, name, stage):
        assert found == pytest.approx(losses, rel=2e-6)
        _assert_weights_equal(values, weights)


@pytest.mark.parametrize(
    ("name", "cut", "whole"),
    [
        ("llava", "model.language_model.layers.0.mlp.up_proj.weight", "vision_tower"),
        ("qwen", "model.language_model.layers.0.mlp.up_proj.weight", "visual"),
        ("bart", "model.encoder.layers.1.fc1.weight", "layer_norm"),
    ],
)
def test_cut_by_tensor(name, cut, whole):
    losses, weights = _expected(name)
    for found, shapes, values in run_ranks(_by_tensor, 2, name):
        assert found == pytest.approx(losses, rel=2e-6)
        _assert_weights_equal(values, weights)
        assert shapes[cut][0] == weights[cut].size(0) // 2
        assert all(shapes[key] == weights[key].shape for key in shapes if whole in key)


@on_ranks(2)
def test_what_cannot_be_cut_is_refused() -> None:
    engine = _engine("llava", 0, sequence_parallel_size=2)
    batch = {key: value[:, :6] for key, value in _batch("llava", 0).items() if key != "pixel_values"}
    with pytest.raises(DeepSpeedConfigError, match="was called with labels and without shift_labels"):
        engine(**batch)
    batch.pop("labels")
    with pytest.raises(
        DeepSpeedConfigError, match=r"expected position_ids of this rank's tokens, \(2, 6\), found \(3, 2"
    ):
        engine(**batch, position_ids=torch.zeros(3, 2, 6).long())
    with pytest.raises(DeepSpeedConfigError, match="expected input_ids, .* found attention_mask, inputs_embeds"):
        engine(inputs_embeds=torch.zeros(2, 6, 24), attention_mask=batch["attention_mask"])
    assert engine(**batch, use_cache=False).logits.shape == (2, 6, 40)
    with pytest.raises(DeepSpeedConfigError, match="expected its decoder as .* where CLIP.* stands beside it"):
        _engine("clip", 0, sequence_parallel_size=2)
    with pytest.raises(DeepSpeedConfigError, match="it attends from one sequence to another"):
        _engine("bart", 0, sequence_parallel_size=2)
