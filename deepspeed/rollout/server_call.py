"""Calls to an inference server over HTTP, each with a limit of time that no answer can extend."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

_EXCERPT = 300  # characters of a server's answer in a message
_POLL = 0.01  # seconds
_LINGER = 2.0  # seconds that a failed call gets to end after the connection for weights broke


class ServerFailure(Exception):
    """A server died, refused a call or was late. The message is one line with the address and the call."""

    def __init__(self, call: str, what: str, status: int = 0, answer: str = "") -> None:
        super().__init__(f"{call}: {what}")
        self.status = status  # of HTTP; 0: there was no answer
        self.answer = answer  # its body


class DaemonThread:
    """Runs an action in a daemon thread, which the program can stop waiting for."""

    def __init__(self, action: Callable[[], Any]) -> None:
        self._action = action
        self._result: Any = None
        self._error: BaseException | None = None
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="weights for a server", daemon=True).start()

    def _run(self) -> None:
        try:
            self._result = self._action()
        except BaseException as error:  # `result` raises it, in the thread that waits
            self._error = error
        finally:
            self._ended.set()

    @property
    def is_done(self) -> bool:
        """Whether the action has returned or raised."""
        return self._ended.is_set()

    def wait(self, seconds: float) -> bool:
        """Waits at most ``seconds``; returns whether the action has ended."""
        return self._ended.wait(max(seconds, 0.0))

    def result(self) -> Any:
        """Returns what the action has returned, or raises what it has raised."""
        if self._error is not None:
            raise self._error
        return self._result


class ServerCall:
    """One HTTP call in progress.

    Args:
        url: Address of the server, ``http://host:port``, with a path before those of the calls or without.
        timeout: Seconds for the whole call: connection, sending and answer.
    """

    def __init__(self, url: str, method: str, path: str, body: Any, timeout: float) -> None:
        self.name = f"{method} {url.rstrip('/')}{path.partition('?')[0]}"
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._running = DaemonThread(lambda: self._request(url, method, path, body))

    def _request(self, url: str, method: str, path: str, body: Any) -> Any:
        address = urlsplit(url)
        kind = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
        connection = kind(address.hostname or "", address.port, timeout=self._timeout)
        try:
            data = None if method == "GET" else json.dumps(body or {}).encode()
            headers = {"Connection": "close", **({} if data is None else {"Content-Type": "application/json"})}
            connection.request(method, address.path.rstrip("/") + path, body=data, headers=headers)
            response = connection.getresponse()
            answer = response.read().decode(errors="replace")
        except TimeoutError:
            raise self._late() from None
        except (OSError, http.client.HTTPException) as error:
            text = str(error) or type(error).__name__
            raise self.failure(f"no answer ({' '.join(text.split())}); see whether the server runs") from error
        finally:
            connection.close()
        if response.status != 200:
            excerpt = " ".join(answer.split())[:_EXCERPT]
            raise self.failure(
                f"expected status 200, found {response.status}" + (f" with {excerpt!r}" if excerpt else ""),
                response.status,
                answer,
            )
        try:
            return json.loads(answer or "null")
        except ValueError:  # the answer to a POST may be any text
            return None

    def failure(self, what: str, status: int = 0, answer: str = "") -> ServerFailure:
        """Returns the failure of this call."""
        return ServerFailure(self.name, what, status, answer)

    def _late(self) -> ServerFailure:
        missing = "its workers have not taken the weights" if self._running.is_done else "no answer"
        return self.failure(f"{missing} within {self._timeout:g} s; see what the server does, or raise timeout")

    def result(self) -> Any:
        """Returns the answer, parsed; None if it is no JSON. Raises ServerFailure."""
        self.wait_for(self._running)
        return self._running.result()

    def wait_for(self, work: DaemonThread) -> Any:
        """Waits for work that runs beside this call and that the server takes part in; returns its result.

        Raises:
            ServerFailure: The call or the work failed, or the call's time is over.
        """
        while not work.wait(_POLL):
            if self._running.is_done:
                self._running.result()  # raises if the call failed
            if time.monotonic() > self._deadline:
                raise self._late()
        try:
            return work.result()
        except ServerFailure:
            raise
        except Exception as error:
            # A server that dies breaks the connection for weights and the call; the call's error says more.
            if self._running.wait(_LINGER):
                self._running.result()
            text = " ".join(str(error).split())[:_EXCERPT]
            raise self.failure(f"the connection for weights failed ({type(error).__name__}: {text})") from error
