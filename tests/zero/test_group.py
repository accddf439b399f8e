"""The groups of ranks of one engine (``zero.group``)."""

import itertools
from typing import Any
from unittest import mock

from deepspeed.zero.group import BucketGroup, Groups
from tests.harness.loopback import LoopbackTransport, run_threads


def test_a_copy_with_codecs_keeps_the_number_of_the_engine() -> None:
    def body(transport: LoopbackTransport) -> None:
        numbers = itertools.count(7)

        def next_owner(*_: Any) -> int:
            return next(numbers)

        with mock.patch.object(transport, "next_owner", next_owner):
            groups = Groups.of(BucketGroup.over(transport))
            assert groups.coded(None, None).owner == groups.owner == transport.owner == 7
            assert Groups.of(BucketGroup.over(transport)).owner == 8

    run_threads(body, 1)
