"""``ds_ssh``: runs one command on all machines of a host file."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from deepspeed.cli.command import run_command
from deepspeed.launcher.resources import DLTS_HOSTFILE, LauncherError, fetch_hostfile

_AT_ONCE = 64


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line; options must precede the command."""
    parser = argparse.ArgumentParser(
        prog="ds_ssh",
        allow_abbrev=False,
        description="Runs a command on every machine of a host file, with pdsh, or with ssh if pdsh is not installed.",
    )
    parser.add_argument(
        "-f", "--hostfile", default=DLTS_HOSTFILE, help="file with lines 'host slots=N' (default: %(default)s)"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the command, for a shell on each machine")
    return parser.parse_args(args)


def main(args: Sequence[str] | None = None) -> None:
    """Runs the command; exits with the largest of the machines' exit codes."""
    run_command("ds_ssh", lambda: _run(parse_args(args)), args)


def _run(args: argparse.Namespace) -> int:
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise LauncherError("expected a command after the options, found none; for example: ds_ssh hostname")
    hosts = fetch_hostfile(args.hostfile)
    if hosts is None:
        raise LauncherError(f"there is no host file {args.hostfile}; name one with -f, with lines 'host slots=N'")
    line = " ".join(command)
    if shutil.which("pdsh"):
        # pdsh would expand a percent sign, see `man pdsh`.
        words = ["pdsh", "-S", "-f", "1024", "-w", ",".join(hosts), line.replace("%", "%%")]
        return subprocess.run(words, env={**os.environ, "PDSH_RCMD_TYPE": "ssh"}).returncode
    if shutil.which("ssh") is None:
        raise LauncherError("neither 'pdsh' nor 'ssh' is in PATH on this machine; install one of them")
    with ThreadPoolExecutor(min(len(hosts), _AT_ONCE)) as pool:
        return max(pool.map(lambda host: _run_on(host, line), hosts))


def _run_on(host: str, line: str) -> int:
    command = ["ssh", "-o", "BatchMode=yes", "--", host, line]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None
        for text in process.stdout:
            sys.stdout.write(f"{host}: {text.rstrip()}\n")
        sys.stdout.flush()
    return process.returncode if process.returncode >= 0 else 128 - process.returncode  # as a shell after a signal


if __name__ == "__main__":
    main()
