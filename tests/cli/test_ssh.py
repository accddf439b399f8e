"""``ds_ssh``: one command on all machines."""

import os

import pytest

from deepspeed.cli import ssh
from deepspeed.errors import DeepSpeedError
from tests.harness.programs import needs_program


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """An ssh that stays here and prints where it should have gone; nothing else beyond the system's shell tools."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "ssh").write_text(
        '#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done\nhost=$2; shift 2\nHOST=$host exec /bin/sh -c "$*"\n'
    )
    (folder / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    (tmp_path / "hosts").write_text("a slots=1\nb slots=2\n")
    monkeypatch.chdir(tmp_path)
    return folder


def test_every_machine_runs_the_line(programs, capfd):
    ssh.main(["-f", "hosts", "echo", "on", "$HOST;", "echo", "100%"])
    assert sorted(capfd.readouterr().out.splitlines()) == ["a: 100%", "a: on a", "b: 100%", "b: on b"]


def test_a_command_behind_two_hyphens(programs, tmp_path, capfd):
    (tmp_path / "hosts").write_bytes("a slots=1  # caf\xe9\n".encode("latin-1"))
    ssh.main(["-f", "hosts", "--", "echo", "--", "on", "$HOST"])
    assert capfd.readouterr().out == "a: -- on a\n"


def test_the_exit_code_is_the_largest(programs):
    with pytest.raises(SystemExit) as stop:
        ssh.main(["--hostfile=hosts", "[ $HOST = a ] || exit 4"])
    assert stop.value.code == 4


def test_an_ssh_that_a_signal_ended_has_failed(programs):
    with pytest.raises(SystemExit) as stop:
        ssh.main(["-f", "hosts", "[ $HOST = a ] || kill -9 $$"])
    assert stop.value.code == 128 + 9


@needs_program("pdsh")
def test_with_pdsh(programs, monkeypatch, capfd):
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    (programs / "ssh").write_text('#!/bin/sh\nfor line; do :; done\nexec /bin/sh -c "$line"\n')
    with pytest.raises(SystemExit) as stop:
        ssh.main(["-f", "hosts", "echo 100%; exit 3"])
    assert stop.value.code == 3
    assert sorted(capfd.readouterr().out.splitlines()) == ["a: 100%", "b: 100%"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "expected a command"),
        (["-f", "none", "x"], "there is no host file none"),
        (["-f", "hosts", "x"], "neither"),
    ],
)
def test_mistakes(programs, monkeypatch, args, words):
    if words == "neither":
        monkeypatch.setenv("PATH", os.devnull)
    with pytest.raises(DeepSpeedError, match=words):
        ssh.main(args)
