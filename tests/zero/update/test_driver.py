"""What a class of update drivers must define (``zero.update.driver``)."""

import pytest
from typing_extensions import override

from deepspeed.zero.update.driver import ExchangeResult, MeanGradient, UpdateDriver


def test_a_driver_that_reads_what_it_exchanges_must_define_the_exchange():
    with pytest.raises(TypeError, match=r"Forgetful has no exchange.*Override exchange"):

        class Forgetful(UpdateDriver):
            pass

    with pytest.raises(TypeError, match="Switched has no exchange"):

        class Switched(MeanGradient):
            reads_mean_gradients = False


def test_a_driver_that_reads_mean_gradients_must_not_define_an_exchange():
    with pytest.raises(TypeError, match=r"Unread\.exchange is never called.*reads_mean_gradients = False"):

        class Unread(MeanGradient):
            @override
            def exchange(
                self, norm: float, used: list[list[bool]], *, scale: float, clip_grad: float
            ) -> ExchangeResult:
                return ExchangeResult(norm, None, used)


def test_a_driver_may_override_both():
    class Exchanging(MeanGradient):
        reads_mean_gradients = False

        @override
        def exchange(self, norm: float, used: list[list[bool]], *, scale: float, clip_grad: float) -> ExchangeResult:
            return ExchangeResult(norm, None, used)

    class Derived(Exchanging):
        pass

    assert Derived().exchange(2.0, [[True]], scale=1.0, clip_grad=0.0) == ExchangeResult(2.0, None, [[True]])
