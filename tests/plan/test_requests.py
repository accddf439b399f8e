"""What goes into a plan and what comes out: machines, refusals, advice, sweeps and the command line."""

import json
import re
from types import SimpleNamespace

import pytest

import deepspeed
from deepspeed.accelerator.devices import DEVICES, in_words, read_bytes
from deepspeed.cli.plan import _parser, main
from deepspeed.config import parse
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.plan import DecoderShape
from deepspeed.plan.sweep import Point, frontier, read_axes, sweep, sweep_text
from deepspeed.zero.placement import Tier
from deepspeed.zero.storage import StorageKind
from tests.plan.requests import CONFIG, SHAPE, SIZES, pair_with_inputs, plan


def talks():
    print("hello")
    return pair_with_inputs()


@pytest.mark.parametrize(("text", "nbytes"), [("80GB", 80 * 10**9), ("1.5 GiB", 3 * 2**29), ("7kib", 7168), (12, 12)])
def test_quantities(text, nbytes):
    assert read_bytes(text, "memory") == nbytes


@pytest.mark.parametrize("text", ["80", "GB", "-3GB", "80 gigs", 0])
def test_quantities_without_sense_are_refused(text):
    with pytest.raises(DeepSpeedConfigError, match="device memory"):
        plan(device_memory=text)


def test_wrong_configurations_get_the_engines_message():
    broken = {**CONFIG, "train_batch_size": 7}
    with pytest.raises(DeepSpeedConfigError) as planned:
        plan(config=broken)
    with pytest.raises(DeepSpeedConfigError) as real:
        parse(broken, dp_world_size=1)
    assert str(planned.value) == str(real.value)
    with pytest.raises(DeepSpeedConfigError, match="stage"):
        plan(config={**CONFIG, "zero_optimization": {"stage": 7}})


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ({"train_micro_batch_size_per_gpu": "4"}, (4, 1)),
        ({"train_micro_batch_size_per_gpu": 4.0, "gradient_accumulation_steps": "2"}, (4, 2)),
        ({"train_batch_size": "8"}, (4, 1)),
        (
            {"elasticity": {"enabled": True, "version": 0.1, "max_train_batch_size": 8, "micro_batch_sizes": [2]}},
            (2, 2),
        ),
        ({"train_batch_size": 12, "train_micro_batch_size_per_gpu": 2, "elasticity": {"continue": True}}, (2, 3)),
    ],
)
def test_batch_sizes_are_read_as_the_engine_reads_them(batch, expected):
    open_batch = {name: value for name, value in CONFIG.items() if name != "train_micro_batch_size_per_gpu"}
    made = plan(config={**open_batch, **batch}, devices_per_node=2, suggest=False)
    assert (made.micro_batch, made.accumulation_steps) == expected
    assert made.tokens == 2 * expected[0] * expected[1] * 32


def test_a_changed_offload_replaces_its_old_spelling():
    config = {**CONFIG, "zero_optimization": {"stage": 2, "cpu_offload": True}}
    made = plan(config=config, devices_per_node=2)
    assert "optimizer on cpu" in made.table() and made.host_bytes > 0
    offloaded, plain = sweep(made.request, {"offload": ["cpu", "none"]})
    assert offloaded.plan.host_bytes == made.host_bytes and plain.plan.host_bytes == 0


def test_arguments_without_sense():
    for options, expected in (
        ({"nodes": "2"}, "whole number"),
        ({"devices_per_node": True}, "whole number"),
        ({"sequence_length": 0.5}, "whole number"),
        ({"rank": 7}, "from 0 to 0"),
        ({"device": None}, "not in the table"),
        ({"device_memory": 80.0}, "no unit"),
        ({"headroom": "5%"}, "share"),
        ({"link": "fast"}, "bytes per second"),
    ):
        with pytest.raises(DeepSpeedConfigError, match=expected):
            plan(**options)
    with pytest.raises(TypeError, match=r"plan\(node=\.\.\.\): expected one of model, config, nodes, .*rename"):
        plan(node=2)


def test_gathers_in_two_steps_are_planned_as_one():
    zero = {"stage": 3, "mics_shard_size": 4}
    plain, by_nodes = (
        plan(config={**CONFIG, "zero_optimization": {**zero, **more}}, nodes=4, devices_per_node=2)
        for more in ({}, {"mics_hierarchical_params_gather": True})
    )
    assert by_nodes.simulated.flow == plain.simulated.flow
    assert any("two steps" in notice for notice in by_nodes.notices)
    assert by_nodes.config["zero_optimization"]["mics_hierarchical_params_gather"] is True


def test_traffic_between_and_inside_nodes():
    made = plan(nodes=4, devices_per_node=2)
    rows = {row.name: row for row in made.transfers}
    gather = rows["all_gather"]
    assert (gather.inside, gather.between) == (gather.nbytes // 2, gather.nbytes * 3 // 4 // 2)
    assert rows["reduce_scatter"].nbytes == gather.nbytes, "stage 1 moves its parameters once each way"


def test_ranks_that_share_inside_a_node_send_nothing_between_nodes_to_gather():
    """hpZ: parameters are shared by neighbors; what goes along the other axis crosses nodes."""
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    wide = plan(config={**CONFIG, "zero_optimization": zero}, nodes=4, devices_per_node=4)
    near = plan(
        config={**CONFIG, "zero_optimization": {**zero, "zero_hpz_partition_size": 2}}, nodes=4, devices_per_node=4
    )
    gather = {row.axis: row for row in near.transfers if row.name == "all_gather"}
    assert set(gather) == {"shard", "replicate"}
    assert (gather["shard"].inside, gather["shard"].between) == (gather["shard"].nbytes // 2, 0)
    # Two ranks with the same slices on each of four nodes.
    assert gather["replicate"].between == gather["replicate"].nbytes * 3 // 4 // 2
    assert all(row.axis == "data" for row in wide.transfers)
    assert "all_gather (shard)" in near.table() and "all_gather (shard)" in near.to_dict()["collectives"]


def test_muon_at_many_ranks():
    """Planned is the rank that has most to do; it sends its slice to the owners and the matrices back."""
    config = {**CONFIG, "optimizer": {"type": "Muon", "params": {"lr": 1e-4}}}
    made = plan(config=config, nodes=8192, devices_per_node=8)
    exchanges, nbytes = made.simulated.flow.requested["all_to_all"]
    largest, own_slice = 64 * 256 * 4, 64 * 4
    assert exchanges == 2 and nbytes >= largest - own_slice
    idle = plan(config=config, nodes=8192, devices_per_node=8, rank=65535)
    assert idle.simulated.flow.requested["all_to_all"] == (2, 0)
    assert any("largest matrix" in notice for notice in made.notices) and not idle.notices
    assert made.simulated.flow.flops > idle.simulated.flow.flops
    for nodes, devices in ((1, 2), (2, 1)):
        few = plan(config=config, nodes=nodes, devices_per_node=devices)
        row = next(row for row in few.transfers if row.name == "all_to_all")
        sent = few.simulated.flow.ran["all_to_all_single"][1]
        assert 0 < sent == row.nbytes and (row.inside, row.between) == ((sent, 0) if nodes == 1 else (0, sent))


def test_offloaded_states_are_on_the_host_and_page_locked():
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True}, "offload_param": {"device": "cpu"}}
    made = plan(config={**CONFIG, "zero_optimization": {**zero, "stage3_param_persistence_threshold": 0}})
    kinds = made.simulated.kind_peaks
    assert (
        kinds[StorageKind.OPTIMIZER, Tier.HOST]
        == 2 * kinds[StorageKind.MASTER, Tier.HOST]
        == 4 * kinds[StorageKind.COMPUTE, Tier.HOST]
    )
    assert (StorageKind.MASTER, Tier.DEVICE) not in kinds
    assert made.simulated.pinned >= kinds[StorageKind.MASTER, Tier.HOST]
    assert made.simulated.flow.up > 0 and made.simulated.flow.down > 0


def test_advice_is_planned_and_fits():
    need = plan(devices_per_node=8).device_bytes
    made = plan(devices_per_node=8, device_memory=int(need * 0.9), headroom=0.0)
    assert not made.fits and made.suggestions
    for change, other in made.suggestions:
        assert change and other.fits and other.device_bytes <= int(need * 0.9)
    assert "DOES NOT FIT" in made.table() and made.suggestions[0][0] in made.table()


def test_ranks_cost_nothing():
    small, large = plan(nodes=1, devices_per_node=8), plan(nodes=8192, devices_per_node=8)
    assert large.machine.ranks == 65536
    assert {k: c for k, (c, _) in large.simulated.flow.requested.items()} == {
        k: c for k, (c, _) in small.simulated.flow.requested.items()
    }


def test_command_line(tmp_path, capsys):
    config = tmp_path / "ds.json"
    config.write_text(json.dumps(CONFIG))
    written = tmp_path / "chosen.json"
    assert main([str(config), *SIZES, "--devices", "2", "--json", "--write", str(written)]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["fits"] and result["device_bytes"] == result["peak"]["device"]["bytes"]
    assert json.loads(written.read_text())["zero_optimization"] == {"stage": 1}
    assert main([str(config), *SIZES, "--device-memory", "1MB", "--no-suggestions"]) == 1
    shown = capsys.readouterr().out
    assert "DOES NOT FIT" in shown and "No change" not in shown, "none was tried"
    assert main([str(config), *SIZES, "--device", "abacus"]) == 2
    assert "h100" in capsys.readouterr().err
    assert main([str(config), "--layers", "2"]) == 2
    assert "--hidden" in capsys.readouterr().err
    assert main(["--list-devices"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in DEVICES)


def test_sweep(tmp_path, capsys):
    picture = tmp_path / "sweep.svg"
    axes = ["world=1,4", "stage=2,3", "offload=none,cpu"]
    assert main([*SIZES, "--devices", "2", "--sweep", *axes, "--picture", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("yes") == 8 and "*" in printed
    assert picture.read_text().startswith("<svg") and picture.read_text().count("<circle") == 8
    with pytest.raises(DeepSpeedConfigError, match="offload"):
        read_axes(["offload=tape"])
    assert in_words(3 * 2**30) == "3.00 GiB"


def test_a_sweep_compares_tokens_per_second():
    """Larger degrees make steps shorter and batches smaller; that alone is no reason to choose them."""
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, "bf16": {"enabled": True}}
    shape = DecoderShape(layers=2, hidden=256, heads=8, vocab=512)
    points = []
    for tensor in (1, 4):
        made = plan(shape, config, devices_per_node=8, tensor=tensor, sequence_length=2048, suggest=False)
        points.append(Point({"tensor": tensor}, made))
    whole, cut = (point.plan for point in points)
    assert cut.step_seconds < whole.step_seconds and cut.tokens_per_second < whole.tokens_per_second
    assert cut.device_bytes < whole.device_bytes, "by far less than a twentieth of a device"
    assert whole.tokens == 4 * cut.tokens == 8 * whole.request.sequence_length
    assert frontier(points) == points[:1]
    text = sweep_text(points)
    assert f"{whole.tokens_per_second:,.0f}" in text and "host per node" not in text
    assert whole.to_dict()["tokens_per_second_at_most"] == whole.tokens_per_second


def test_a_sweep_names_the_longest_wait():
    def waiting(share):
        return SimpleNamespace(
            fits=False,
            device_bytes=1,
            host_bytes=0,
            nvme_bytes=0,
            step_seconds=None,
            tokens_per_second=None,
            idle=SimpleNamespace(share=share),
            better_accumulation=(round(32 * share), None),
        )

    points = [Point({"pipe": stages}, waiting(share)) for stages, share in ((2, 0.5), (4, 1.5), (8, 1.0))]
    text = " ".join(sweep_text(points).split())
    assert "in 3 combination(s) the stages wait" in text and "150% at most" in text and "--accumulation 48" in text


def test_sums_of_tensor_ranks_are_waited_for():
    made = plan(devices_per_node=8, tensor=4, suggest=False)
    bounds = made.lower_bounds
    sums = sum(row.inside for row in made.transfers if row.axis == "tensor") / made.machine.device.link
    waits = bounds["arithmetic, and exchanges that it waits for"] - bounds["arithmetic"]
    assert sums / 2 <= waits <= sums and made.step_seconds >= bounds["arithmetic"] + sums / 2
    assert "arithmetic, and exchanges that it waits for" not in plan(devices_per_node=8, suggest=False).lower_bounds


def test_a_pipeline_that_waits_is_advised_to_accumulate(capsys):
    sizes = ["--layers", "4", "--hidden", "64", "--heads", "4", "--vocab", "256", "--no-suggestions"]
    assert main([*sizes, "--devices", "4", "--pipe", "4"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    steps = int(re.search(r"\(--accumulation (\d+)\) they wait", shown)[1])
    assert shown.index("Device: fits") < shown.index("Memory of one rank in a step"), "the verdict comes first"
    assert main([*sizes, "--devices", "4", "--pipe", "4", "--accumulation", str(steps)]) == 0
    shown = capsys.readouterr().out
    assert f"micro-batch 1 x {steps}" in shown and "Pipeline: the stages wait" not in shown
    assert main([*sizes, "--devices", "4", "--sweep", "pipe=1,4", f"accumulation=1,{steps}"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "in 1 combination(s) the stages wait" in shown
    assert main([*sizes, "--accumulation", "0"]) == 2
    assert "--accumulation: expected a whole number of 1 or more, found 0" in capsys.readouterr().err


_INTEGERS = [action.option_strings[0] for action in _parser()._actions if action.type is int]


@pytest.mark.parametrize("option", _INTEGERS)
def test_absurd_counts_end_in_a_sentence(option, capsys):
    sizes = {"--layers": "2", "--hidden": "64", "--heads": "4", "--vocab": "256"}
    predicted = ("--context", "--shard-ranks", "--lighter-ends", "--gradient-bytes")
    further = ["--predict"] if option in predicted else []
    arguments = [text for pair in {**sizes, option: str(10**20)}.items() for text in pair]
    assert main([*arguments, *further]) == 2
    assert re.fullmatch(r"ds_plan: .*expected .*[,(;].*\n", capsys.readouterr().err)


def test_ranks_are_counted_over_all_nodes(capsys):
    sizes = ["--layers", "2", "--hidden", "64", "--heads", "4", "--vocab", "256"]
    for further in ([], ["--predict"], ["--search", "64"]):
        assert main([*sizes, "--nodes", "200000", "--devices", "8", *further]) == 2
        assert "200,000 nodes of 8 devices: expected at most 262,144, found 1,600,000" in capsys.readouterr().err
    assert main([*sizes, "--sweep", f"micro_batch={10**20}"]) == 2
    assert "expected at most 1,048,576" in capsys.readouterr().err


def test_codecs_are_shown_on_request(capsys):
    sizes = ["--layers", "2", "--hidden", "64", "--heads", "4", "--vocab", "256", "--nodes", "2", "--devices", "2"]
    assert main(sizes) == 0
    assert "Gradients as codes" not in capsys.readouterr().out
    assert main([*sizes, "--codes"]) == 0
    assert "Gradients as codes" in capsys.readouterr().out


def test_an_accumulation_replaces_the_global_batch():
    made = plan(config={**CONFIG, "train_batch_size": 8}, accumulation=3, micro_batch=2, suggest=False)
    assert (made.micro_batch, made.accumulation_steps) == (2, 3)
    assert any("train_batch_size was left out" in notice for notice in made.notices)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--headroom", "2"], "headroom: expected a share"),
        (["--network", "nan"], "network: expected bytes per second above 0"),
        (["--kv-heads", "0"], "--kv-heads: expected a whole number of 1 or more, found 0"),
        (["--intermediate", "-4"], "--intermediate: expected"),
        (["--sweep", "stage=1", "stage=2"], "given twice"),
        (["--write", "."], "found a folder"),
        (["--write", "no/such/folder/x.json"], "there is no folder no/such/folder"),
        (["--sweep", "stage=1", "--picture", "no/x.svg"], "there is no folder no"),
        (["--device", "cpu"], "--device-memory"),
    ],
)
def test_options_without_sense(arguments, expected, capsys):
    assert main([*SIZES, *arguments]) == 2
    printed = capsys.readouterr()
    assert expected in printed.err and printed.out == ""


def test_only_the_result_is_printed_and_files_are_whole(tmp_path, capsys, monkeypatch):
    target = tmp_path / "chosen.json"
    target.write_text("old")
    arguments = ["--model", f"{__name__}:talks", "--json", "--write", str(target)]
    assert main(arguments) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["fits"] and "hello" in printed.err
    assert json.loads(target.read_text())["zero_optimization"] == {"stage": 3}
    target.write_text("old")
    monkeypatch.setattr("pathlib.Path.replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    assert main(arguments) == 2
    assert "disk full" in capsys.readouterr().err
    assert target.read_text() == "old" and list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("80GB", "with 80 GB"),
        ("1.5GB", "with 1.5 GB"),
        ("6MB", "with 6 MB"),
        ("1.5TB", "1,500 GB"),
        ("64GiB", "with 64.00 GiB"),
    ],
)
def test_the_memory_of_a_device_is_shown_as_given(given, expected):
    assert expected in plan(device="other", device_memory=given, suggest=False).table()


def test_what_the_hybrid_engine_holds_while_it_generates():
    config = {**CONFIG, "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
    config["hybrid_engine"] = {"enabled": True}
    made = plan(config=config, devices_per_node=4)
    pinned = [notice for notice in made.notices if notice.startswith("hybrid_engine")]
    whole = 2 * made.simulated.parameters
    assert len(pinned) == 1 and "more than between steps" in pinned[0]
    found = read_bytes(pinned[0].split(" holds ")[1].split(" more")[0], "it")
    assert 0.95 * whole < found < 1.2 * whole
    config["hybrid_engine"]["pin_parameters"] = False
    made = plan(config=config, devices_per_node=4)
    assert any("for every token" in notice for notice in made.notices)
    config["zero_optimization"] = {"stage": 2}
    made = plan(config=config, devices_per_node=4)
    assert not any(notice.startswith("hybrid_engine") for notice in made.notices)


def test_sections_that_write_files_and_wait_for_signals_do_nothing_in_a_plan(tmp_path):
    writes = {
        "run_report": {"path": str(tmp_path / "report")},
        "trace": {"path": str(tmp_path / "trace"), "first_step": 1},
        "preemption": {"enabled": True, "save_dir": str(tmp_path / "saved")},
        "csv_monitor": {"enabled": True, "output_path": str(tmp_path / "csv")},
    }
    plain, found = (deepspeed.plan(SHAPE, {**CONFIG, **more}, sequence_length=32) for more in ({}, writes))
    assert found.device_bytes == plain.device_bytes and list(tmp_path.iterdir()) == []


def test_on_processors_the_verdict_counts_the_memory_of_all_ranks():
    sizes = {"device": "cpu", "devices_per_node": 4, "suggest": False}
    device_bytes = plan(device_memory="64GB", **sizes).device_bytes
    made = plan(device_memory=2 * device_bytes, host_memory=3 * device_bytes, **sizes)
    assert not made.fits and "Host: DOES NOT FIT" in made.table()
    assert plan(device_memory=2 * device_bytes, host_memory=5 * device_bytes, **sizes).fits
