"""Host files, filters, and the encoded world."""

import pytest

from deepspeed.launcher.resources import (
    LauncherError,
    decode_world_info,
    encode_world_info,
    fetch_hostfile,
    parse_inclusion_exclusion,
    parse_resource_filter,
)

HOSTS = {"worker-0": 4, "worker-1": 2}


def test_hostfile(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("# cluster\n\nworker-1 slots=2  # spare\n  worker-0   slots=4\n")
    assert list(fetch_hostfile(str(path)).items()) == [("worker-1", 2), ("worker-0", 4)]


@pytest.mark.parametrize(
    ("text", "slots"),
    [
        ("a\nb\n", {"a": 8, "b": 8}),  # a plain list: every machine has as many as this one
        ("a\na\nb\nb\n", {"a": 2, "b": 2}),  # $PBS_NODEFILE: a line per slot
        ("a\na\nb\n", {"a": 2, "b": 1}),
        ("a slots=2\nb\n", {"a": 2, "b": 8}),
        ("a slots=2 max_slots=2\nb slots=2 max-slots=4\n", {"a": 2, "b": 2}),  # Open MPI
        ("fe80::1:2 slots=2\n", {"fe80::1:2": 2}),
    ],
)
def test_a_plain_list_of_hosts(tmp_path, text, slots):
    path = tmp_path / "hosts"
    path.write_text(text)
    assert fetch_hostfile(str(path), lambda: 8) == slots


def test_a_hostfile_of_any_bytes(tmp_path):
    path = tmp_path / "hosts"
    path.write_bytes(b"\xef\xbb\xbfworker-1 slots=2  # caf\xe9\n")
    assert fetch_hostfile(str(path)) == {"worker-1": 2}
    path.write_bytes(b"worker-1 slots=2\ncaf\xe9 slots=2\n")
    with pytest.raises(LauncherError, match="line 2: expected the name of a machine"):
        fetch_hostfile(str(path))


@pytest.mark.parametrize("missing", [None, "None", "/no/such/hostfile"])
def test_no_hostfile(missing):
    assert fetch_hostfile(missing) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no host in the file"),
        ("# nothing\n", "no host in the file"),
        ("worker-0 slots=2\nworker-1 slots=x\n", "line 2: expected 'host slots=N' or 'host', found 'worker-1 slots=x'"),
        ("worker-0 4\n", "line 1: expected 'host slots=N' or 'host'"),
        ("a\na slots=2\n", "line 2: host 'a' comes a second time"),
        ("worker-0 slots=1 slots=2\n", "line 1: expected"),
        ("a slots=1\nb slots=1\na slots=2\n", "line 3: host 'a' comes a second time"),
        ("a slots=1\nworker-1:2\n", "line 2: .*found 'worker-1:2'; write 'worker-1 slots=2'"),  # MPICH
        ("a slots=3 max_slots=2\n", "line 1: expected slots up to max_slots, found 'a slots=3 max_slots=2'"),
        ("a max_slots=2\n", "line 1: expected"),
    ],
)
def test_bad_hostfiles_are_value_errors_with_the_line(tmp_path, text, message):
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        fetch_hostfile(str(path))


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        ("", "", {"worker-0": [0, 1, 2, 3], "worker-1": [0, 1]}),
        ("worker-1", "", {"worker-1": [0, 1]}),
        ("worker-1@worker-0:3,1", "", {"worker-0": [1, 3], "worker-1": [0, 1]}),
        ("worker-0:0@worker-0:2", "", {"worker-0": [0, 2]}),
        ("", "worker-0", {"worker-1": [0, 1]}),
        ("", "worker-1:0@worker-0:0,1,2", {"worker-0": [3], "worker-1": [1]}),
        ("", "worker-1:0,1", {"worker-0": [0, 1, 2, 3]}),
    ],
)
def test_filters(include, exclude, expected):
    selected = parse_inclusion_exclusion(HOSTS, include, exclude)
    assert selected == expected
    assert list(selected) == sorted(selected)


@pytest.mark.parametrize(
    ("include", "exclude", "message"),
    [
        ("worker-0", "worker-1", "exclude each other"),
        ("worker-2", "", "host 'worker-2' is unknown; name one of worker-0, worker-1"),
        ("", "worker-1:2", r"host 'worker-1' has no slots \[2\]; choose from \[0, 1\]"),
        ("worker-0:a", "", "expected slot numbers"),
        ("worker-0:", "", "expected slot numbers"),
        ("worker-0:1,", "", "expected slot numbers"),
        ("@", "", "host ''"),
    ],
)
def test_bad_filters_are_value_errors(include, exclude, message):
    with pytest.raises(ValueError, match=message):
        parse_inclusion_exclusion(HOSTS, include, exclude)


def test_a_filter_on_named_slots():
    assert parse_resource_filter({"a": [2, 5]}, include_str="a:5") == {"a": [5]}
    with pytest.raises(LauncherError, match=r"has no slots \[0\]; choose from \[2, 5\]"):
        parse_resource_filter({"a": [2, 5]}, exclude_str="a:0")


def test_world_round_trip():
    world = {"a": [0, 3], "b": ["GPU-12ab"]}
    encoded = encode_world_info(world)
    assert not set(encoded) & set("+/ ")
    assert decode_world_info(encoded) == world


@pytest.mark.parametrize("text", ["None", "{}", "bm90IGpzb24=", "e30=", "eyJhIjogW119"])
def test_bad_worlds(text):
    with pytest.raises(LauncherError, match="world_info"):
        decode_world_info(text)


@pytest.mark.parametrize("line", ["-F/tmp/x slots=1", "-oProxyCommand=reboot", "$(reboot)", "a;b slots=2", "a,b"])
def test_a_host_that_programs_would_take_for_something_else(tmp_path, line):
    (tmp_path / "hosts").write_text(f"worker-1 slots=1\n{line}\n")
    with pytest.raises(LauncherError, match="line 2: expected"):
        fetch_hostfile(str(tmp_path / "hosts"))
