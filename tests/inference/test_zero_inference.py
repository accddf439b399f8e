"""Weights that come layer by layer: how many bytes move at each width, and keys and values in host memory."""

import pytest
import torch

import deepspeed
from deepspeed.comm.base.counters import counted
from deepspeed.offload.files import FileMemory
from deepspeed.offload.host import HostMemory
from tests.harness import on_ranks, run_ranks
from tests.harness.toy_models import causal_model
from tests.inference.test_tensor_parallel import Counted, tokens
from tests.inference.test_tensor_parallel import make as make_family

transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 32,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WIDTHS = {"bf16": {"dtype": "bf16"}, 8: {"dtype": "int8"}, 4: {"dtype": "int8", "quant": {"weight": {"num_bits": 4}}}}


def make():
    """Returns a model whose rotary frequencies are rounded, as those of an engine are."""
    return causal_model(**SIZES).eval().bfloat16()


def prompt():
    return torch.arange(3, 19).view(2, 8)


BITS = {8: {"num_bits": 8}, 4: {"num_bits": 4, "group_size": 64}}


def engine_of(width, offload=None):
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 1}
    zero |= {"stage3_max_live_parameters": 1, "stage3_max_reuse_distance": 0}
    zero |= {"offload_param": offload} if offload else {}
    if not offload or offload["device"] != "cpu":
        return deepspeed.init_inference(make(), {**WIDTHS[width], "zero": zero})
    # init_inference leaves out what only copies, so the engine itself is asked.
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": zero}
    config |= {"weight_quantization": {"quantized_initialization": BITS[width]}} if width in BITS else {}
    config |= {"hybrid_engine": {"enabled": True, "pin_parameters": False}}
    engine = deepspeed.initialize(model=make(), config=config)[0]
    engine.eval()
    return engine


class Moved:
    """Counts the bytes that are read from host memory and from files."""

    def __init__(self, monkeypatch):
        self.nbytes = 0
        for kind in (HostMemory, FileMemory):
            monkeypatch.setattr(kind, "read", self._counting(kind.read))

    def _counting(self, plain):
        def read(memory, source, target):
            self.nbytes += source.numel() * source.element_size()
            return plain(memory, source, target)

        return read


def assert_shares(moved):
    """Of what bf16 moves, codes of 8 bits are a half and of 4 bits a quarter; scales and embeddings come on top."""
    assert 0.5 <= moved[8] / moved["bf16"] < 0.55
    assert 0.25 <= moved[4] / moved["bf16"] < 0.33


def per_forward(width):
    engine = engine_of(width)
    engine(prompt())
    with counted() as traffic:
        engine(prompt())
        gathered = traffic.requested["all_gather"].nbytes
    return gathered


def gathered():
    return {width: per_forward(width) for width in WIDTHS}


def test_fewer_bytes_are_gathered():
    for found in run_ranks(gathered, 2):
        assert_shares(found)


def offloaded(section):
    with pytest.MonkeyPatch.context() as patch:
        found = {}
        counter = Moved(patch)
        for width in WIDTHS:
            plain = deepspeed.init_inference(make(), WIDTHS[width])
            expected = plain.generate(prompt(), max_new_tokens=4, min_new_tokens=4, do_sample=False)
            engine = engine_of(width, section)
            with torch.no_grad():
                assert torch.equal(engine(prompt()).logits, plain(prompt()).logits)
            counter.nbytes = 0
            with torch.no_grad():
                engine(prompt())
            found[width] = counter.nbytes
            for cache in (None, "offloaded", "offloaded_static"):
                more = {} if cache is None else {"cache_implementation": cache}
                tokens = engine.generate(prompt(), max_new_tokens=4, min_new_tokens=4, do_sample=False, **more)
                assert torch.equal(tokens, expected)
            config = transformers.GenerationConfig(
                max_new_tokens=4, min_new_tokens=4, cache_implementation="offloaded", eos_token_id=2, pad_token_id=0
            )
            assert torch.equal(engine.generate(prompt(), generation_config=config), expected)
            assert config.cache_implementation == "offloaded"
            engine.destroy()
        return found


@on_ranks(1)
def test_offload_that_would_only_copy_is_left_out():
    engine = engine_of("bf16", None)
    left_out = deepspeed.init_inference(
        make(), {"dtype": "bf16", "zero": {"stage": 3, "offload_param": {"device": "cpu"}}}
    )
    assert torch.equal(engine(prompt()).logits, left_out(prompt()).logits)
    assert all(p.numel() for p in left_out.module.parameters()), "one rank, no device: nothing is copied"


@pytest.mark.parametrize("tier", ["host", "file", "cached file"])
def test_fewer_bytes_come_from_host_and_files(tier, tmp_path):
    section = {"device": "cpu"}
    if tier != "host":
        section = {"device": "nvme", "nvme_path": str(tmp_path), "max_in_cpu": 0, "page_cache": tier == "cached file"}
    assert_shares(run_ranks(offloaded, 1, section)[0])


@on_ranks(2, timeout=180)
def test_each_rank_reads_its_slices(folder):
    """Each rank reads its slices of a model on meta; also where files have experts one by one; then few bits."""
    for family in ("llama", "mixtral"):
        place = f"{folder}/{family}"
        whole = make_family(family)
        if torch.distributed.get_rank() == 0:
            whole.save_pretrained(place)
        torch.distributed.barrier()
        zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
        with Counted() as read:
            config = {"dtype": "fp32", "zero": zero, "checkpoint": place}
            engine = deepspeed.init_inference(make_family(family, "meta"), config)
        total = sum(t.numel() for t in whole.parameters())
        assert 0.45 * total < read.numel < 0.56 * total, (family, read.numel, total)
        assert torch.equal(tokens(engine), tokens(whole)), family
        engine.destroy()
    few = {"dtype": "int8", "zero": zero, "checkpoint": f"{folder}/llama"}
    engine = deepspeed.init_inference(make_family("llama", "meta"), few)
    plain = deepspeed.init_inference(make_family("llama"), dtype="int8")
    assert torch.equal(engine(prompt()).logits, plain(prompt()).logits)
