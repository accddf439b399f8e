"""The passes of transformers that give weights their first values, over models that zero.Init has sharded."""

import copy
import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.errors import ShardedAccessError
from tests.zero.construction import pretrained as models
from tests.zero.construction.test_init import full_values, same_everywhere

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import (
    BertForMaskedLM,
    DistilBertModel,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    T5ForConditionalGeneration,
    Wav2Vec2ForSequenceClassification,
    initialization,
)

from tests.harness import on_ranks


class OddConfig(PreTrainedConfig):
    model_type = "odd"

    def __init__(self, fails: bool = False, **kwargs):
        super().__init__(**kwargs)
        self.fails = fails


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.empty(5))
        self.register_buffer("table", torch.empty(5), persistent=False)
        self.inner = nn.Sequential(nn.Linear(4, 6), nn.Bilinear(2, 3, 4))


class OddModel(PreTrainedModel):
    """A pass that goes further down than to a module's children, asks for shapes, and leaves weights out."""

    config: OddConfig
    base_model_prefix = "odd"

    def __init__(self, config):
        super().__init__(config)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.post_init()

    def _init_weights(self, module):
        super()._init_weights(module)
        if isinstance(module, Block):
            initialization.ones_(module.scale)
            initialization.copy_(module.table, torch.arange(5.0))
            initialization.normal_(module.inner[0].weight, std=module.inner[0].weight.shape[1] ** -0.5)
            initialization.xavier_uniform_(module.inner[1].weight[0])
            if self.config.fails:
                raise LookupError("in the middle")
        elif module is self:
            for name, parameter in self.named_parameters():
                if name.endswith("inner.0.bias"):
                    initialization.constant_(parameter, math.sqrt(parameter.numel()))


CASES = {
    "gpt2": (GPT2LMHeadModel, models.gpt2_config),
    "llama": (LlamaForCausalLM, models.llama_config),
    "bert": (BertForMaskedLM, models.bert_config),  # a bias is fitted to the tied weight
    "distilbert": (DistilBertModel, lambda: models.distilbert_config(sinusoidal_pos_embds=True)),  # rank 0's table
    "t5": (T5ForConditionalGeneration, models.t5_config),
    "wav2vec2": (Wav2Vec2ForSequenceClassification, models.wav2vec2_config),
    "odd": (OddModel, OddConfig),
}


def _as_unsharded(name):
    """The same draws of random numbers in the same order: constructors first, then one pass over everything."""
    kind, config = CASES[name][0], CASES[name][1]()
    torch.manual_seed(3)
    with mock.patch.object(PreTrainedModel, "init_weights", lambda self: None):
        plain = kind(copy.deepcopy(config))
    plain.initialize_weights()
    plain.tie_weights()
    with models.zero3_switched_on(models.auto_config()):
        torch.manual_seed(3 + dist.get_rank())  # rank 0's numbers count
        built = kind._from_config(config)
    values = full_values(built)
    assert same_everywhere(values)
    for parameter_name, parameter in plain.named_parameters():
        assert torch.equal(values[parameter_name], parameter), (name, parameter_name)
    for (buffer_name, buffer), (_, mine) in zip(plain.named_buffers(), built.named_buffers(), strict=True):
        assert buffer.dtype == mine.dtype and torch.equal(buffer, mine), (name, buffer_name)
    return built


@on_ranks(2)
def test_the_values_are_those_of_an_unsharded_model():
    for name in CASES:
        built = _as_unsharded(name)
    # Outside of the pass nothing is served.
    weight = built.blocks[0].inner[0].weight
    assert weight.shape == (0,) and weight.ds_shape == (6, 4)
    for touch in (lambda: nn.init.zeros_(weight), lambda: weight.sum(), lambda: built._init_weights(built.blocks[0])):
        with pytest.raises(ShardedAccessError, match="outside the engine's forward"):
            touch()
    # A pass that fails changes nothing that was not given back before, and leaves nothing open.
    before = full_values(built)["blocks.1.scale"]
    built.config.fails = True
    for module in built.modules():
        module._is_hf_initialized = False
    with torch.no_grad(), pytest.raises(LookupError):
        built.initialize_weights()
    assert all(p.shape == (0,) for p in built.parameters())
    assert torch.equal(full_values(built)["blocks.1.scale"], before)


@on_ranks(2)
def test_weights_under_weight_norm_load_and_train(rank, ranks, tmp_path):
    folder = str(tmp_path)
    kind, config = Wav2Vec2ForSequenceClassification, models.wav2vec2_config()
    torch.manual_seed(0)
    saved = kind(config)
    if rank == 0:
        saved.save_pretrained(folder)
    dist.barrier()
    plain = kind.from_pretrained(folder)
    with models.zero3_switched_on(models.auto_config()):
        model = kind.from_pretrained(folder)
    values = full_values(model)
    for name, parameter in plain.named_parameters():
        assert torch.equal(values[name], parameter), name
    config = {
        "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
    }  # fmt: skip
    engine = deepspeed.initialize(model=model.train(), config=config)[0]
    optimizer = torch.optim.SGD(plain.train().parameters(), lr=0.5)
    for step in range(3):
        waves = [torch.randn(2, 400, generator=torch.Generator().manual_seed(3 * step + r)) for r in range(ranks)]
        labels = torch.tensor([0, 1])
        loss = engine(input_values=waves[rank], labels=labels).loss
        engine.backward(loss)
        engine.step()
        optimizer.zero_grad()
        for other, wave in enumerate(waves):
            reference = plain(input_values=wave, labels=labels).loss
            (reference / ranks).backward()
            if other == rank:
                torch.testing.assert_close(loss, reference, rtol=1e-5, atol=1e-6)
        optimizer.step()
        masters = dict(engine.iter_full("fp32"))
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(masters[name], parameter.detach(), rtol=1e-4, atol=1e-5)
    position = "wav2vec2.encoder.pos_conv_embed.conv.parametrizations.weight.original"
    assert all(not torch.equal(masters[f"{position}{n}"], values[f"{position}{n}"]) for n in (0, 1))
