"""Peak memory of building, loading and initialize: never more than one module or unit above the shards."""

import gc
import os
import sys

import pytest
import torch
import torch.distributed as dist

import deepspeed
from tests.harness import run_ranks
from tests.zero.construction import pretrained as models
from tests.zero.construction.memory import AnonymousMemory

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]
pytest.importorskip("transformers")
pytest.importorskip("accelerate")

RANKS = 4
SETTINGS = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


def _big(**more):
    return models.llama_config(
        hidden_size=512, intermediate_size=1408, num_hidden_layers=12, num_attention_heads=8, num_key_value_heads=8,
        vocab_size=1000, **more,
    )  # fmt: skip


def _big_mixture():
    return models.mixtral_config(
        hidden_size=256, intermediate_size=768, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=8,
        vocab_size=1000, num_local_experts=8,
    )  # fmt: skip


def _start():
    gc.collect()
    pids = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    watch = AnonymousMemory(pids) if dist.get_rank() == 0 else None
    dist.barrier()
    return watch


def _stop(watch):
    dist.barrier()
    if watch is None:
        return 0, 0, 0
    watch.stop()
    return watch.first, watch.peak, watch.last


def _load(folder, build):
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    kind = transformers.AutoModelForCausalLM
    with models.zero3_switched_on(models.auto_config()):
        small = kind.from_pretrained(f"{folder}/small")  # imports, threads, connections
        deepspeed.initialize(model=small, config=SETTINGS)
        del small
        gc.collect()
        watch = _start()
        model = kind.from_config(_big()) if build else kind.from_pretrained(f"{folder}/big")
        loaded = _stop(watch)
    nbytes = sum(p.ds_numel * p.element_size() for p in model.parameters())
    watch = _start()
    engine = deepspeed.initialize(model=model, config=SETTINGS)[0]
    moved = _stop(watch)
    with torch.no_grad():
        engine(input_ids=models.tokens(0))
    return nbytes, loaded, moved


@pytest.mark.parametrize("build", [False, True])
def test_no_rank_ever_holds_more_than_its_shard_and_a_module(tmp_path, build):
    import transformers

    kind = transformers.AutoModelForCausalLM
    kind.from_config(_big()).save_pretrained(tmp_path / "big", max_shard_size="40MB")
    kind.from_config(models.llama_config()).save_pretrained(tmp_path / "small")
    assert len(list((tmp_path / "big").glob("*.safetensors"))) > 3
    nbytes, loaded, moved = run_ranks(_load, RANKS, str(tmp_path), build, timeout=280, fresh="interpreter")[0]
    first = loaded[0]
    report = [f"{(value - first) / nbytes:.3f}" for value in (loaded[1], loaded[2], moved[1], moved[2])]
    print(f"{nbytes / 2**20:.0f} MiB on {RANKS} ranks, in sizes of the model above the start: "
          f"loading peak {report[0]}, after {report[1]}; initialize peak {report[2]}, after {report[3]}")  # fmt: skip
    assert loaded[1] - first <= (1.35 if build else 1.25) * nbytes
    assert moved[1] - first <= 1.35 * nbytes  # from the provisional shards to the final ones, in portions
    assert moved[2] - first <= 1.25 * nbytes


def test_a_mixture_of_experts_is_read_layer_by_layer(tmp_path):
    """Files have it expert by expert: rank 0 stacks one weight of a layer while all gather it, and both are small."""
    import transformers

    kind = transformers.AutoModelForCausalLM
    kind.from_config(_big_mixture()).save_pretrained(tmp_path / "big", max_shard_size="40MB")
    kind.from_config(models.mixtral_config()).save_pretrained(tmp_path / "small")
    nbytes, (first, most, after), _ = run_ranks(_load, 2, str(tmp_path), False, timeout=280, fresh="interpreter")[0]
    layer = 8 * 3 * 256 * 768 * 4
    above = (most - first - nbytes) / 2 / layer
    print(f"{nbytes / 2**20:.0f} MiB on 2 ranks: a rank had {above:.2f} layers above its share while loading")
    assert above <= 2.25 and after - first <= 1.1 * nbytes
