"""What ``ds_plan`` refuses: each case with one sentence that names the setting and what to change."""

import json

import pytest

from deepspeed.cli.plan import main
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.plan import DEVICES, DecoderShape, Machine, ParallelLayout, StepSetup, predict_step, search_layouts
from deepspeed.plan.configs import read_config
from deepspeed.plan.machine import read_machine_file

SIZES = "--layers 4 --hidden 256 --heads 4 --vocab 1024 --devices 8".split()


def _refusal(arguments, capsys):
    assert main([*SIZES, *arguments.split()]) == 2
    text = capsys.readouterr().err
    assert text.startswith("ds_plan: ") and text.count("\n") == 1, "one sentence"
    return text


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"zero_optimisation": {"stage": 1}}, 'did you mean "zero_optimization"'),
        ({"zero_optimization": {"stagee": 1}}, "zero_optimization.stagee"),
        ({"zero_optimization": {"stage": 7}}, "expected 0, 1, 2 or 3, found 7"),
        ({"zero_optimization": {"stage": "two"}}, 'found "two"'),
        ({"zero_optimization": [1]}, "zero_optimization: expected an object"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": "cpu"}}, "offload_optimizer: expected an object"),
        ({"bf16": True}, "bf16: expected an object"),
        ({"compile": 5}, "compile: expected an object"),
        ({"tensor_parallel": {"autotp_size": "x"}}, "autotp_size: expected an integer"),
        ({"data_types": {"grad_accum_dtype": "fp99"}}, "grad_accum_dtype"),
    ],
)
@pytest.mark.parametrize("kind", ["--predict", "--search 8"])
def test_a_prediction_refuses_configurations_that_the_engine_refuses(kind, config, message, capsys, tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    assert message in _refusal(f"{path} {kind}", capsys)


def test_zero_optimization_may_have_its_old_form(tmp_path, capsys):
    path = tmp_path / "ds_config.json"
    path.write_text('{"zero_optimization": true}', encoding="utf-8")
    assert read_config(path) == {"zero_optimization": {"stage": 1}}
    assert main([*SIZES, str(path), "--predict"]) == 0
    assert "stage 1" in capsys.readouterr().out
    assert main([*SIZES, str(path)]) == 0
    assert "ZeRO stage 1" in capsys.readouterr().out


def test_a_search_does_not_read_the_batch_of_the_configuration(tmp_path, capsys):
    path = tmp_path / "ds_config.json"
    path.write_text('{"train_batch_size": 7, "tensor_parallel": {"autotp_size": 3}}', encoding="utf-8")
    assert main([*SIZES, str(path), "--search", "8"]) == 0
    assert "The best of" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--predict --gradient-bytes 3", "gradient_bytes=3: expected 2"),
        ("--predict --imbalance 0.5", "imbalance=0.5: expected 1 or more"),
        ("--predict --imbalance nan", "imbalance=nan: expected 1 or more"),
        ("--predict --lighter-ends -1", "--lighter-ends: expected a whole number of 0 or more"),
        ("--predict --shard-ranks 0", "--shard-ranks: expected a whole number of 1 or more"),
        ("--predict --dropout 2", "--dropout: expected a probability"),
        ("--predict --experts -1", "--experts: expected a whole number of 0 or more"),
        ("--predict --tensor 8", "tensor=8: must divide the 4 attention heads"),
        ("--predict --sequence 8", "sequence=8: exchanges tokens for heads, of which each rank has 4"),
        ("--predict --context 2 --sequence-length 2049", "context=2: must divide the 2049 tokens"),
        ("--predict --ep 2", "ep=2: must divide the number of experts (0)"),
        ("--predict --experts 4 --ep 8", "ep=8: must divide the number of experts (4)"),
        ("--predict --fp8 --device a100", "--fp8: device 'a100' has no fp8"),
        ("--predict --search 8", "keep one"),
        ("--predict --longest --host-memory 1TB", "--longest, --host-memory: --predict simulates no step"),
        ("--predict --sweep stage=1,2", "--sweep: --predict simulates no step"),
        ("--search 8 --write best.json", "--write: --search simulates no step"),
        ("--search 8 --tensor 2 --micro-batch 4", "--micro-batch, --tensor: --search tries all of them"),
        ("--search 8 --recompute full", "--recompute: --search tries all of them"),
        ("--search -4", "--search: expected a whole number of 1 or more, found -4"),
        ("--predict --picture step.png", "expected a name that ends in .svg or .json"),
        ("--sweep stage=1 --picture sweep.json", "expected a name that ends in .svg;"),
    ],
)
def test_options_that_cannot_be_or_would_have_no_effect(arguments, message, capsys):
    assert message in _refusal(arguments, capsys)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"like": "h100", "flops": NaN}', "flops: expected a number of 0 or more, found nan"),
        ('{"like": "h100", "efficiency": {"matmul": 0}}', "matmul: expected a number above 0, found 0"),
        ('{"like": "h100", "efficiency": {"link": 0}}', "link: expected a number above 0, found 0"),
        ('{"like": "h100", "efficiency": {"launch": -1}}', "launch: expected a number of 0 or more, found -1"),
        ('{"like": "h100", "name": 5}', "name: expected text, found 5"),
        ('{"like": "h100", "cores": 1.5}', "cores: expected a whole number, found 1.5"),
    ],
)
def test_machine_files_with_fields_of_another_kind(text, message, tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DeepSpeedConfigError, match=message):
        read_machine_file(path)


def test_a_machine_whose_links_are_unknown_has_no_predicted_time(tmp_path, capsys):
    path = tmp_path / "mine.json"
    path.write_text('{"memory": "10GB", "flops": 1e12, "memory_bandwidth": 1e11}', encoding="utf-8")
    assert "the links inside a node" in _refusal(f"--predict --machine {path}", capsys)
    assert "the links inside a node" in _refusal(f"--search 8 --machine {path}", capsys)
    assert main([*SIZES, "--machine", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "A step takes at least" in shown and "predicted" not in shown
    assert main([*SIZES, "--machine", str(path), "--devices", "1", "--predict"]) == 0, "one device has no links"


def test_links_may_be_without_limit(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text('{"like": "h100", "link": Infinity}', encoding="utf-8")
    shape, layout = DecoderShape(4, 256, 4, 1024), ParallelLayout(data=8, stage=3)
    seconds = [
        predict_step(StepSetup(shape, layout, Machine(device, 1, 8, device.memory), 2048)).seconds
        for device in (read_machine_file(path), DEVICES["h100"])
    ]
    assert seconds[0] < seconds[1]


def test_a_search_leaves_out_layouts_that_cannot_have_the_shards():
    machine = Machine(DEVICES["h100"], 1, 8, DEVICES["h100"].memory)
    base = ParallelLayout(shard_ranks=2, cuts_norms=True)
    ranking = search_layouts(DecoderShape(4, 256, 4, 1024), machine, 2048, 8, base=base)
    layouts = [each.step.setup.layout for each in ranking.best]
    assert layouts and all(layout.data * layout.context % 2 == 0 for layout in layouts)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"hidden_size": "big"}, "hidden_size"),
        ({"hidden_size": 100, "num_attention_heads": 7}, "not a multiple of the number of attention heads"),
    ],
)
def test_transformers_configurations_that_the_library_refuses(facts, message, tmp_path, capsys):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **facts}), encoding="utf-8")
    assert main(["--model", str(tmp_path)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert message in lines[-1]
    assert all("ds_plan: building the model" in line for line in lines[:-1]), "progress, on a busy machine"


def test_a_module_that_exits_while_it_is_imported(tmp_path, capsys, monkeypatch):
    (tmp_path / "ends_at_once.py").write_text("import sys\nsys.exit(3)\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["--model", "ends_at_once:build"]) == 2
    assert "cannot be imported (SystemExit: 3)" in capsys.readouterr().err
