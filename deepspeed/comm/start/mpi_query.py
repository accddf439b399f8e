"""Queries MPI's process manager for the host of rank 0, in a separate process.

Every rank runs this file as a program, without installed packages: rank 0 publishes the host name and the address given
on its command line, and each rank prints both. A process that has made the query cannot start MPI any more, hence the
separate process.

``PMIX_NAMESPACE`` means PMIx (Open MPI 4 and newer, PRRTE), reached through the library that Open MPI brings.
``PMI_FD`` means PMI-1 (MPICH, Intel MPI, MVAPICH): lines of text on an open descriptor. Sources: the PMIx standard 4.1,
chapters 3, 4 and 7; the PMI-1 wire protocol of MPICH.
"""

from __future__ import annotations

import ctypes
import os
import sys

_KEY = b"deepspeed.rank0"
_GLOBAL_SCOPE = 3  # PMIX_GLOBAL
_STRING = 3  # PMIX_STRING
_LIBRARIES = ("libpmix.so.2", "libpmix.so")
_LONGEST_LINE = 4096


class _PmixProcess(ctypes.Structure):
    """``pmix_proc_t``."""

    _fields_ = (("namespace", ctypes.c_char * 256), ("rank", ctypes.c_uint32))


class _PmixValue(ctypes.Structure):
    """``pmix_value_t``: a type and a union, here only its string; padded to be larger than in any PMIx version."""

    _fields_ = (("type", ctypes.c_uint16), ("text", ctypes.c_char_p), ("rest", ctypes.c_uint64 * 8))


def query_pmix(mine: str) -> str:
    """Returns what rank 0 has published; rank 0 publishes ``mine``. All ranks must call it.

    Raises:
        OSError: There is no PMIx library, or it fails.
    """
    library = _load()
    me, none = _PmixProcess(), ctypes.c_size_t(0)
    _succeed("PMIx_Init", library.PMIx_Init(ctypes.byref(me), None, none))
    if me.rank == 0:
        value = _PmixValue(_STRING, mine.encode())
        _succeed("PMIx_Put", library.PMIx_Put(ctypes.c_uint8(_GLOBAL_SCOPE), _KEY, ctypes.byref(value)))
        _succeed("PMIx_Commit", library.PMIx_Commit())
    _succeed("PMIx_Fence", library.PMIx_Fence(None, none, None, none))
    first, found = _PmixProcess(me.namespace, 0), ctypes.POINTER(_PmixValue)()
    _succeed("PMIx_Get", library.PMIx_Get(ctypes.byref(first), _KEY, None, none, ctypes.byref(found)))
    text = found.contents.text.decode() if found.contents.type == _STRING else ""
    _succeed("PMIx_Fence", library.PMIx_Fence(None, none, None, none))  # rank 0 must not end before all have read
    library.PMIx_Finalize(None, none)
    return text


def _load() -> ctypes.CDLL:
    for name in _LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise OSError(f"none of {', '.join(_LIBRARIES)} can be loaded")


def _succeed(call: str, status: int) -> None:
    if status != 0:
        raise OSError(f"{call} returned {status}")


def query_pmi(descriptor: int, rank: int, mine: str) -> str:
    """Like :func:`query_pmix`, with PMI-1, over an open connection to the process manager.

    Raises:
        OSError: The manager answers with an error, or has closed the connection.
    """
    _query(descriptor, "cmd=init pmi_version=1 pmi_subversion=1")
    space = _query(descriptor, "cmd=get_my_kvsname")["kvsname"]
    key = _KEY.decode()
    if rank == 0:
        # A value may hold no space.
        _query(descriptor, f"cmd=put kvsname={space} key={key} value={mine.replace(' ', '|')}")
    _query(descriptor, "cmd=barrier_in")
    value = _query(descriptor, f"cmd=get kvsname={space} key={key}")["value"]
    _query(descriptor, "cmd=barrier_in")
    _query(descriptor, "cmd=finalize")
    return value.replace("|", " ")


def _query(descriptor: int, line: str) -> dict[str, str]:
    os.write(descriptor, f"{line}\n".encode())
    answer = b""
    while not answer.endswith(b"\n"):
        byte = os.read(descriptor, 1)
        if not byte or len(answer) > _LONGEST_LINE:
            raise OSError(f"{line}: the process manager sent {answer!r} and no end of the line")
        answer += byte
    words = dict(word.partition("=")[::2] for word in answer.decode().split())
    if words.get("rc", "0") != "0":
        raise OSError(f"{line}: the process manager answered {answer.decode().strip()!r}")
    return words


def main() -> None:
    """Prints what rank 0 has published: ``NAME ADDRESS``."""
    mine = sys.argv[1]
    if os.environ.get("PMIX_NAMESPACE"):
        text = query_pmix(mine)
    else:
        text = query_pmi(int(os.environ["PMI_FD"]), int(os.environ["PMI_RANK"]), mine)
    sys.stdout.write(text)


if __name__ == "__main__":
    try:
        main()
    except (OSError, KeyError, ValueError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
