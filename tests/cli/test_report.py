"""``ds_report``: what it names, what its options hide, and that it survives a machine in a bad state."""

import io
import json

import pytest
import torch
from rich.console import Console

import deepspeed
from deepspeed.accelerator import cpu, selection
from deepspeed.accelerator.cpu import CPUAccelerator
from deepspeed.cli import report
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.missing_features import FEATURES


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(selection, "_current", CPUAccelerator())


def shown(found, **options):
    text = io.StringIO()
    report.show(found, Console(file=text, width=400), **options)
    return text.getvalue()


def verdicts(found):
    return {row.feature: (row.verdict, row.reason) for row in found.usable}


def test_everything_that_is_missing_is_listed():
    text = " ".join(shown(report.collect()).replace("│", " ").split())
    for feature in FEATURES:
        assert feature.title in text and feature.instead in text


def test_options_hide_tables(capfd, monkeypatch):
    monkeypatch.setattr(report, "_machine_warnings", lambda: iter(["something is wrong"]))
    for options, features, warnings in (
        ([], True, True),
        (["--hide_operator_status"], False, True),
        (["--hide_errors_and_warnings"], True, False),
    ):
        report.main(options)
        out = capfd.readouterr().out
        assert ("What can be used here" in out, "something is wrong" in out) == (features, warnings)
        assert "Versions" in out and "This machine" in out


def test_a_wrong_choice_of_accelerator_is_reported_not_raised(monkeypatch):
    def wrong():
        raise DeepSpeedConfigError("DS_ACCELERATOR=cuda: torch sees no cuda device here")

    monkeypatch.setattr(report, "get_accelerator", wrong)
    found = report.collect()
    assert "DS_ACCELERATOR=cuda" in found.warnings[0]
    assert dict(found.machine)["accelerator"].startswith("cpu")


@pytest.mark.parametrize("native", [True, False])
def test_bf16_on_the_cpu(monkeypatch, native):
    monkeypatch.setattr(report, "cpu_has_bf16", lambda: native)
    monkeypatch.setattr(cpu, "cpu_has_bf16", lambda: native)
    found = report.collect()
    assert verdicts(found)["bf16 training"][0] == ("yes" if native else "slow")
    assert dict(found.machine)["native bf16 in the processor"] == ("yes" if native else "no")


def test_fp16_that_the_processor_emulates_is_slow(monkeypatch):
    monkeypatch.setattr(cpu, "cpu_has_fp16", lambda: False)
    monkeypatch.setattr(cpu, "cpu_has_bf16", lambda: True)
    assert verdicts(report.collect())["fp16 training"] == (
        "slow",
        "cpu has no fp16 instructions; bf16 or fp32 is faster here",
    )


def test_the_longest_table_comes_first_and_warnings_last(monkeypatch):
    monkeypatch.setattr(report, "_machine_warnings", lambda: iter(["something is wrong"]))
    text = shown(report.collect())
    titles = ("Not in this release", "What can be used here", "This machine", "Versions", "warning: something is wrong")
    places = [text.index(title) for title in titles]
    assert places == sorted(places) and text.startswith("Not in this release")


def test_json_has_everything_and_what_the_options_leave(capfd, monkeypatch):
    monkeypatch.setattr(report, "_machine_warnings", lambda: iter(["something is wrong"]))
    report.main(["--json"])
    found = json.loads(capfd.readouterr().out)
    assert found["versions"]["deepspeed"].startswith(deepspeed.__version__) and found["warnings"] == [
        "something is wrong"
    ]
    assert found["versions"]["commit of deepspeed"].startswith(deepspeed.__git_hash__)
    assert found["machine"]["accelerator"].startswith("cpu") and len(found["missing"]) == len(FEATURES)
    assert {"feature": "ZeRO stages 0, 1, 2, 3", "verdict": "yes", "reason": ""} in found["usable"]
    report.main(["--json", "--hide_operator_status", "--hide_errors_and_warnings"])
    assert json.loads(capfd.readouterr().out).keys() == {"machine", "versions"}


def test_what_needs_a_compiler_is_reported(monkeypatch):
    monkeypatch.setattr(report.shutil, "which", lambda name: None)
    verdict, reason = verdicts(report.collect())["torch.compile (optional)"]
    assert verdict == "no" and "C++ compiler" in reason


def test_a_torch_without_communication(monkeypatch):
    monkeypatch.setattr(report.comm, "is_available", lambda: False)
    verdict, reason = verdicts(report.collect())["collectives (gloo)"]
    assert verdict == "no" and "torch.distributed" in reason


def test_small_shared_memory_is_a_warning(monkeypatch):
    monkeypatch.setattr(report.host_memory, "shared_memory_bytes", lambda: (64 << 20, 1 << 20))
    (warning,) = [sentence for sentence in report.collect().warnings if "/dev/shm" in sentence]
    assert "0.06 GiB" in warning and "--shm-size" in warning


def test_devices_that_torch_does_not_see_are_a_warning(monkeypatch):
    monkeypatch.setattr(report.glob, "glob", lambda pattern: ["/dev/nvidia0"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert any("torch sees none of them" in sentence for sentence in report.collect().warnings)


def test_devices_are_listed_with_their_memory(monkeypatch):
    class TwoDevices(CPUAccelerator):
        def device_name(self, index=None):
            return "cuda" if index is None else f"cuda:{index}"

        def device_count(self):
            return 2

        def total_memory(self, index=None):
            return 80 << 30

        def available_memory(self, index=None):
            if index == 1:
                raise RuntimeError("CUDA error: busy\nmore")
            return 20 << 30

    class Module:
        @staticmethod
        def get_device_name(index):
            return f"Fast {index}"

    monkeypatch.setattr(selection, "_current", TwoDevices())
    monkeypatch.setattr(torch, "get_device_module", lambda name: Module)
    machine = dict(report.collect().machine)
    assert machine["cuda:0"] == "Fast 0, 20.0 GiB free of 80.0 GiB"
    assert machine["cuda:1"] == "Fast 1, does not answer: CUDA error: busy"
