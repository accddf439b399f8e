"""``ds_plan MODEL --gpus 8xh100``: one screen with whether it fits, the best layouts, and how to start them."""

import json

import pytest

from deepspeed.cli import plan
from deepspeed.config import parse
from deepspeed.plan.prediction.answer import TIGHT, machine_sizes

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 3072,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}
SIZES = ["--layers", "4", "--hidden", "1024", "--heads", "8", "--vocab", "32000"]
MIDDLE = ["--layers", "16", "--hidden", "4096", "--heads", "32", "--kv-heads", "8", "--vocab", "32000"]
LARGE = [
    "--layers",
    "80",
    "--hidden",
    "8192",
    "--heads",
    "64",
    "--kv-heads",
    "8",
    "--intermediate",
    "28672",
    "--vocab",
    "32000",
]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return str(tmp_path)


@pytest.mark.parametrize(
    ("text", "sizes"),
    [("8xh100", (1, 8, "h100")), ("64xH100", (8, 8, "h100")), ("1xa100", (1, 1, "a100")), ("2x4xh100", (2, 4, "h100"))],
)
def test_devices_are_divided_into_nodes(text, sizes):
    assert machine_sizes(text) == sizes


def test_a_folder_with_a_configuration_is_answered_on_one_screen(folder, capsys):
    assert plan.main([folder, "--gpus", "2xh100", "--search", "16", "--compare"]) == 0
    text = capsys.readouterr().out
    assert "llama configuration, 0.114B parameters, on 1 x 2 h100: fits." in text
    assert "FSDP2" in text and "deepspeed --num_gpus 2 train.py --deepspeed_config ds_config.json" in text
    assert len(text.splitlines()) <= 45 and max(map(len, text.splitlines())) <= 110


def test_each_configuration_is_one_that_the_engine_reads_and_the_layouts_differ(folder, capsys, tmp_path):
    target = tmp_path / "ds_config.json"
    arguments = [folder, "--gpus", "4xh100", "--search", "16", "--json", "--write", str(target)]
    assert plan.main(arguments) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["samples"] == 16 and 1 <= len(facts["best"]) <= 3
    seconds = [each["step_seconds"] for each in facts["best"]]
    assert seconds == sorted(seconds)
    assert len({each["ds_config"]["zero_optimization"]["stage"] for each in facts["best"]}) == len(facts["best"])
    for each in facts["best"]:
        config = parse(each["ds_config"], dp_world_size=4)
        assert config.batch.micro_batch_size * config.batch.accumulation_steps * 4 == 16
        assert each["is_tight"] == (each["memory_share"] > TIGHT)
    assert json.loads(target.read_text()) == facts["best"][0]["ds_config"]


def test_the_engine_chosen_changes_what_is_overlapped(capsys):
    rates = {}
    for like in ("ours", "fsdp", "megatron"):
        assert plan.main([*MIDDLE, "--gpus", "8xh100", "--search", "8", "--like", like, "--json"]) == 0
        best = json.loads(capsys.readouterr().out)["best"]
        rates[like] = best[0]["tokens_per_second"]
        assert like != "fsdp" or all(each["ds_config"]["zero_optimization"] == {"stage": 3} for each in best)
    assert rates["megatron"] > rates["ours"] > 0 and rates["fsdp"] != rates["ours"]


def test_what_fits_only_in_host_memory_says_so(capsys):
    assert plan.main([*LARGE, "--gpus", "8xh100", "--search", "8"]) == 0
    text = capsys.readouterr().out
    assert "fits only with optimizer states in host memory" in text and '"offload_optimizer": {"device"' in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*SIZES, "--gpus", "h100"], "--gpus h100: expected their number and name"),
        ([*SIZES, "--gpus", "12xh100"], "12 devices are no number of nodes of 8"),
        ([*SIZES, "--gpus", "8xh1000"], "h1000"),
        ([*SIZES, "--gpus", "99999999xh100"], "expected at most"),
        ([*SIZES, "--gpus", "8xh100", "--sequence-length", "0"], "--sequence-length: expected a whole number of 1"),
        ([*SIZES, "--gpus", "8xh100", "--pipe", "2"], "--pipe: --gpus searches layouts"),
        ([*SIZES, "--gpus", "8xh100", "--devices", "8"], "leave --nodes and --devices out"),
        (["meta-llama/Llama-3.1-8B", "--gpus", "8xh100"], "names on the hub are not looked up"),
        ([*SIZES, "--compare"], "--compare: only with --gpus"),
        ([*LARGE, "--gpus", "1xh100", "--search", "1"], "none of"),
    ],
)
def test_odd_requests_end_in_a_sentence(capsys, arguments, message):
    assert plan.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("ds_plan: ") and message in error


def test_an_encoder_is_refused_by_name(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5", "architectures": ["T5Model"]}))
    assert plan.main([str(tmp_path), "--gpus", "8xh100"]) == 2
    assert "it has an encoder and a decoder" in capsys.readouterr().err
