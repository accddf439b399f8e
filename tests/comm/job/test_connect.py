"""Which owner number a transport has (``comm.transports.connect``): transfers of two owners must not meet."""

from types import SimpleNamespace
from typing import Any

from typing_extensions import override

from deepspeed.comm.job.connect import Connector
from deepspeed.comm.transports.transport import LocalTransport, Transport, transfer_key


class LocalConnector(Connector):
    """Makes transports without ranks."""

    def __init__(self) -> None:
        super().__init__(SimpleNamespace(is_initialized=lambda: False, backend_for=lambda *_: "gloo"), None, None)  # type: ignore[arg-type]

    @override
    def _over(self, *_: Any) -> Transport:
        return LocalTransport()


def test_engines_layers_and_what_is_outside_engines_have_different_keys() -> None:
    connector, record = LocalConnector(), SimpleNamespace(group=None, transports={})
    engine = connector.over(None, None, is_numbered=True)
    outside = connector.outside_engines(record, "data", None, None)  # type: ignore[arg-type]
    below = connector.below_engines(record, "data", None)  # type: ignore[arg-type]
    assert len({transfer_key(made.owner, 0, 1, 0) for made in (engine, outside, below)}) == 3
    assert connector.below_engines(record, "data", None) is below  # type: ignore[arg-type]
