"""Where a configuration may come from, and which message appears when it cannot be read."""

import base64
import json
import os
import subprocess
from collections import UserDict, UserList
from pathlib import Path
from types import MappingProxyType
from typing import Any

import hjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed.config import load_ds_config, parse
from deepspeed.config.parsing import parse_section
from deepspeed.config.sections.monitor import CommsLogger
from deepspeed.config.source import read_source
from deepspeed.errors import DeepSpeedConfigError
from tests.config.support import only_problem, problems

HJSON = """
# outer braces may be missing
train_batch_size: 16,   // a comment
'fp16': {
  enabled: True
  /* several
     lines */
  loss_scale_window: 5e2
}
"zero_optimization":
{
  "stage": 2, "overlap_comm": no
}
"""


def write(folder: Path, text: str) -> str:
    file = folder / "ds_config.json"
    file.write_text(text)
    return str(file)


def test_the_three_forms_read_alike(tmp_path: Path) -> None:
    config = {"train_batch_size": 8, "zero_optimization": {"stage": 2}}
    text = json.dumps(config)
    sources: list[Any] = [config, write(tmp_path, text), tmp_path / "ds_config.json"]
    sources.append(base64.urlsafe_b64encode(text.encode()).decode())
    sources.append(sources[-1].rstrip("="))
    for source in sources:
        assert parse(source).root.zero_optimization.stage == 2
        assert load_ds_config(source) == config


def test_base64_in_lines_and_a_pipe(tmp_path: Path) -> None:
    text = json.dumps({"train_batch_size": 8, "_note": "x" * 200})
    assert parse(base64.encodebytes(text.encode()).decode()).root.train_batch_size == 8
    assert parse(subprocess.check_output(["base64"], input=text.encode()).decode()).root.train_batch_size == 8
    reader, writer = os.pipe()  # as <(command) of a shell
    os.write(writer, text.encode())
    os.close(writer)
    assert parse(f"/dev/fd/{reader}").root.train_batch_size == 8
    os.close(reader)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: Any, **_more: Any) -> str:
        raise PermissionError(13, "Permission denied")

    source = write(tmp_path, "{}")
    monkeypatch.setattr(Path, "read_text", refuse)
    assert "ds_config.json cannot be used: the file cannot be read (Permission denied)" in problem_text(source)


def problem_text(source: str) -> str:
    with pytest.raises(DeepSpeedConfigError) as caught:
        parse(source)
    return str(caught.value)


def test_mappings_of_other_types(tmp_path: Path) -> None:
    inner = UserDict({"type": "AdamW", "params": MappingProxyType({"betas": UserList([0.5, 0.9]), "_note": 1})})
    source = UserDict({"train_batch_size": 8, "optimizer": inner, "zero_optimization": MappingProxyType({"stage": 2})})
    for mapping in (source, dict(source)):
        root = parse(mapping).root
        assert root.zero_optimization.stage == 2
        assert root.optimizer is not None and root.optimizer.params == {"betas": [0.5, 0.9]}
        assert only_problem({**mapping, "fp16": UserDict({"enabld": 1})}).startswith("fp16.enabld: unknown key")


def test_remarks_in_a_section_that_is_read_alone() -> None:
    config = {"comms_logger": {"_why": "to see", "enabled": True, "prof_ops": ["all_reduce"]}}
    section = parse_section(config, "comms_logger")
    assert isinstance(section, CommsLogger) and section.enabled and section.prof_ops == ["all_reduce"]
    assert parse_section(config, "tensorboard") is None


def test_the_callers_dict_is_kept_and_untouched() -> None:
    config = {
        "train_batch_size": "8",
        "bfloat16": {"enabled": "auto"},
        "_note": {"a": 1},
        "optimizer": {"type": "adam"},
    }
    before = json.dumps(config)
    assert parse(config).raw is config
    assert json.dumps(config) == before


def test_a_json_file_that_is_hjson_gets_one_line(tmp_path: Path) -> None:
    text = '{"train_batch_size": 2,\n "optimizer": {"type": "SGD", "params": {"lr": 0.1 "momentum": 0.9}}}'
    (tmp_path / "a.json").write_text(text.replace('0.1 "', '0.1\n"'))
    (line,) = [notice for notice in parse(tmp_path / "a.json").notices if "JSON" in notice]
    assert "a.json is not JSON (Expecting ',' delimiter: line 3" in line and "was read as Hjson" in line
    for name, content in (("a.hjson", text.replace('0.1 "', '0.1\n"')), ("b.json", '{"train_batch_size": 2}')):
        (tmp_path / name).write_text(content)
        assert not [notice for notice in parse(tmp_path / name).notices if "JSON" in notice]


def test_hjson(tmp_path: Path) -> None:
    root = parse(write(tmp_path, HJSON)).root
    assert root.fp16.enabled is True and root.fp16.loss_scale_window == 500
    assert root.zero_optimization.overlap_comm is False


def test_lines_of_the_offending_keys(tmp_path: Path) -> None:
    text = HJSON.replace("loss_scale_window", "loss_scale_windw").replace('"stage": 2', '"stage": 4')
    found = problems(write(tmp_path, text), batch=False)
    assert found[0].startswith("fp16.loss_scale_windw (line 8): unknown key")
    assert found[1].startswith("zero_optimization.stage (line 12): expected 0, 1, 2 or 3, found 4")
    assert len(found) == 2


def test_a_colon_between_key_and_value_does_not_hide_the_line(tmp_path: Path) -> None:
    text = '{"train_batch_size": 8,\n"fp16":\n\n  {"enabld":\n true}}'
    assert only_problem(write(tmp_path, text), batch=False).startswith("fp16.enabld (line 4): unknown key")


def test_duplicate_keys_at_any_depth_are_all_reported(tmp_path: Path) -> None:
    text = """{
      "train_batch_size": 8,
      "fp16": {"enabled": true},
      "optimizer": {"type": "Adam", "params": {"lr": 1,
         "lr": 2}},
      "fp16": {"loss_scale": 0, "hysterisis": 3}
    }"""
    found = problems(write(tmp_path, text), batch=False)
    assert sorted(found) == [
        "fp16 (lines 3 and 6): the key occurs twice; keep one of them",
        'fp16.hysterisis (line 6): unknown key; did you mean "fp16.hysteresis"?',
        "optimizer.params.lr (lines 4 and 5): the key occurs twice; keep one of them",
    ]
    with pytest.raises(DeepSpeedConfigError, match="twice"):
        load_ds_config(str(tmp_path / "ds_config.json"))


def test_duplicate_keys_in_base64() -> None:
    text = base64.urlsafe_b64encode(b'{"train_batch_size": 8, "train_batch_size": 9}').decode()
    assert only_problem(text, batch=False) == "train_batch_size: the key occurs twice; keep one of them"


@pytest.mark.parametrize("text", ["{", '{"a": [1, 2', '{"a" 1}', "/* open", "{a b: 1}", '{"a": "b'])
def test_broken_syntax_is_named_with_the_file(tmp_path: Path, text: str) -> None:
    with pytest.raises(DeepSpeedConfigError, match="ds_config.json"):
        parse(write(tmp_path, text))


def test_syntax_errors_name_the_line(tmp_path: Path) -> None:
    assert "line 3" in only_problem(write(tmp_path, '{\n"a": 1,\n]: 2}'), batch=False)
    assert "'q'" in only_problem(write(tmp_path, '{"a": "\\q"}'), batch=False)
    unclosed = '{\n"a": {\n"b": {"c": 1},\n"d": 2\n'
    assert "line 2: the object a that begins there has no closing brace" in only_problem(write(tmp_path, unclosed))
    swallowed = '{\n"a": 3 "b": {"c": 1}}'  # an unquoted text runs to the end of its line
    assert "line 1: the object that begins there has no closing brace" in only_problem(write(tmp_path, swallowed))
    assert "column 6: expecting ':' delimiter; found '1}'" in only_problem(write(tmp_path, '{"a" 1}'))
    assert f"{tmp_path} is a folder" in only_problem(str(tmp_path)) + only_problem(tmp_path)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (None, "found nothing"),
        (3, "found int"),
        ([], "found list"),
        ("missing.json", "there is no file 'missing.json'"),
        ('{"train_batch_size": 8}', "JSON text itself is not taken"),
        (Path("missing.json"), "there is no file missing.json"),
        ("a\0b", "there is no file"),
        ("x" * 5000, "there is no file"),
        (base64.urlsafe_b64encode(b"[1]").decode(), "expected an object with keys, found list"),
    ],
)
def test_what_is_no_source(source: Any, words: str) -> None:
    assert words in only_problem(source, batch=False)


def test_an_empty_configuration_lacks_a_batch_size(tmp_path: Path) -> None:
    for source in ({}, write(tmp_path, ""), write(tmp_path, "{}")):
        assert "expected train_batch_size or train_micro_batch_size_per_gpu" in only_problem(source, batch=False)


names = st.text("abcdefgh_ é", min_size=1, max_size=6)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text("abc #:,'\"/\n{}[]", max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=12,
)


def _survives_hjson(data: Any) -> bool:
    """The library writes a text that ends in an apostrophe so that it cannot read it again."""
    try:
        return bool(hjson.loads(hjson.dumps(data)) == data)
    except hjson.HjsonDecodeError:
        return False


@settings(max_examples=60)
@given(st.dictionaries(names, values, max_size=4))
def test_the_reader_agrees_with_hjson_and_has_every_line_number(
    tmp_path_factory: pytest.TempPathFactory, data: Any
) -> None:
    file = tmp_path_factory.mktemp("hjson") / "config.json"
    file.write_text(hjson.dumps(data) if len(data) % 2 and _survives_hjson(data) else json.dumps(data, indent=1))
    document = read_source(str(file))
    assert document.data == data
    assert not document.problems

    def paths(value: Any, path: tuple[Any, ...] = ()) -> Any:
        inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for name, item in inner:
            if isinstance(value, dict):
                yield (*path, name)
            yield from paths(item, (*path, name))

    assert set(document.lines) == set(paths(data))
