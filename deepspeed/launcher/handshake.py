"""Identifies launchers, and proves that they belong to the run.

A connection starts with three messages: the hub's challenge, the launcher's hello and the hub's reply. Both sides
prove that they have the secret of the run, without sending it: each signs the other's random number (HMAC-SHA256). The
messages after that are not signed, and nothing is encrypted. This keeps out processes that connect, by chance or on
purpose, but not an attacker who controls the network between the machines.
"""

from __future__ import annotations

import hmac
import json
import secrets
from dataclasses import dataclass, field, fields
from typing import Any

from deepspeed.logging import printable

FRONT = -1
"""Index of the command that started the launchers on several machines and forwards signals to them."""

_MAGIC = "deepspeed launcher"
_LONGEST_NAME = 255
_NONCE_BYTES = 16


def new_nonce() -> str:
    """Returns a new random number."""
    return secrets.token_hex(_NONCE_BYTES)


def challenge(nonce: str) -> dict[str, Any]:
    """Returns the hub's first message."""
    return {"event": "challenge", "magic": _MAGIC, "nonce": nonce}


def nonce_of(message: dict[str, Any] | None) -> str | None:
    """Returns the random number of a challenge; None if ``message`` is none."""
    if message is None or message.get("event") != "challenge" or message.get("magic") != _MAGIC:
        return None
    nonce = message.get("nonce")
    return nonce if isinstance(nonce, str) else None


@dataclass(frozen=True)
class LauncherInfo:
    """Describes one launcher to the hub."""

    index: int  # number of the launcher in the run; 0 is the hub, and :data:`FRONT` the command that started them
    host: str  # its machine
    sizes: tuple[int, ...]  # ranks that each launcher of the run starts
    master_port: int  # port of the rendezvous; distinguishes runs on the same machines
    version: str  # the version of this package
    run: str = ""  # name of the run; empty where its launchers were started by hand
    # The secret of the launchers of the run; empty if none was given. It is never sent.
    secret: str = field(default="", repr=False)

    def hello(self, hub_nonce: str, own_nonce: str) -> dict[str, Any]:
        """Returns the answer to the hub's challenge ``hub_nonce``."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.name != "secret"}
        message = {"event": "hello", "magic": _MAGIC, **values, "sizes": list(self.sizes), "nonce": own_nonce}
        return self.signed(message, hub_nonce)

    def signed(self, message: dict[str, Any], nonce: str) -> dict[str, Any]:
        """Returns ``message`` with a proof that its sender has the secret and has received ``nonce``."""
        return {**message, "proof": _proof(self.secret, message, nonce)} if self.secret else message

    def is_genuine(self, message: dict[str, Any], nonce: str) -> bool:
        """Returns whether :meth:`signed` of a launcher of this run made ``message``.

        Without a secret every message is accepted.
        """
        if not self.secret:
            return True
        proof = message.get("proof")
        rest = {name: value for name, value in message.items() if name != "proof"}
        return isinstance(proof, str) and hmac.compare_digest(
            proof.encode(errors="replace"), _proof(self.secret, rest, nonce).encode()
        )

    def name_of(self, index: int, host: str) -> str:
        """Returns a description of one launcher and its ranks."""
        if index == FRONT:
            return f"the command on host {host}"
        first = sum(self.sizes[:index])
        last = first + self.sizes[index] - 1
        ranks = f"rank {first}" if first == last else f"ranks {first} to {last}"
        return f"node {index} ({ranks}, host {host})"


@dataclass(frozen=True)
class HandshakeMessage:
    """A hello with every value of the right type."""

    me: LauncherInfo  # the launcher that sent it; its secret is unknown
    nonce: str  # its random number, which the hub's answer must sign

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> HandshakeMessage | None:
        """Reads a message from an untrusted sender; None if it is not the hello of a launcher."""
        if message.get("event") != "hello" or message.get("magic") != _MAGIC:
            return None
        texts = [message.get(name) for name in ("host", "version", "run", "nonce")]
        numbers, sizes = [message.get(name) for name in ("index", "master_port")], message.get("sizes")
        if not isinstance(sizes, list) or not all(type(number) is int for number in (*numbers, *sizes)):
            return None
        if not all(isinstance(text, str) and len(text) <= _LONGEST_NAME for text in texts):
            return None
        host, version, run, nonce = (printable(str(text)).replace("\n", "?") for text in texts)
        return cls(LauncherInfo(int(numbers[0] or 0), host, tuple(sizes), int(numbers[1] or 0), version, run), nonce)


def _proof(secret: str, message: dict[str, Any], nonce: str) -> str:
    text = json.dumps([nonce, message], sort_keys=True)
    return hmac.new(secret.encode(), text.encode(), "sha256").hexdigest()
