"""The exceptions of this package.

::

    DeepSpeedError
    |-- DeepSpeedConfigError (ValueError)        the configuration cannot be used; lists every problem
    |-- NotYetSupportedError (NotImplementedError)  a known feature that this release does not have
    |-- CallOrderError (RuntimeError)            a call that the present state does not allow
    |-- ShardedAccessError (RuntimeError)        computing on, or writing to, a parameter that is not gathered
    |-- DivergenceError (RuntimeError)           ranks did different things in the same collective
    |-- NonFiniteError (RuntimeError)            gradients stayed NaN or infinite for too long
    |-- CommunicationError (RuntimeError)        a peer died or a collective failed
    |-- PipelineError (RuntimeError)             a stage of a pipeline failed, or cannot do a call alone
    |-- CheckpointError (RuntimeError)           a checkpoint is missing, damaged or does not fit
    |-- ElasticityError                          no batch suits the numbers of ranks that section elasticity allows
    `-- OffloadError (RuntimeError)              files of offloaded states cannot be made, read or written

Every message names the setting or call, what was expected, what was found, and what to change.
"""

from __future__ import annotations


class DeepSpeedError(Exception):
    """Base class of everything this package raises on purpose."""


class DeepSpeedConfigError(DeepSpeedError, ValueError):
    """The configuration cannot be used."""

    def __init__(self, message: str, problems: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.problems = problems or (message,)  # one sentence per problem, in the order of the configuration


class NotYetSupportedError(DeepSpeedError, NotImplementedError):
    """A feature whose name is known and which this release does not have."""


class CallOrderError(DeepSpeedError, RuntimeError):
    """A call that is not allowed in the present state."""


class ShardedAccessError(DeepSpeedError, RuntimeError):
    """A sharded parameter was computed on or written to without being gathered."""


class DivergenceError(DeepSpeedError, RuntimeError):
    """Ranks did different things where all must do the same."""


class NonFiniteError(DeepSpeedError, RuntimeError):
    """Gradients were NaN or infinite more often than the configuration tolerates."""


class CommunicationError(DeepSpeedError, RuntimeError):
    """A collective failed: a peer died or timed out."""


class PipelineError(DeepSpeedError, RuntimeError):
    """A stage of a pipeline failed, or a call was made on it that only the whole pipeline supports."""


class CheckpointError(DeepSpeedError, RuntimeError):
    """A checkpoint is missing, damaged, or does not fit the model."""


class ElasticityError(DeepSpeedError):
    """The section ``elasticity`` allows no batch for the run at hand."""


class ElasticityConfigError(ElasticityError, DeepSpeedConfigError):
    """The section ``elasticity`` cannot be used."""


class ElasticityIncompatibleWorldSize(ElasticityError):  # noqa: N818 - the name that programs catch
    """The elastic batch cannot be divided over this number of ranks."""


class OffloadError(DeepSpeedError, RuntimeError):
    """Files of offloaded states cannot be made, read or written."""


class DeprecatedException(DeepSpeedError):  # noqa: N818 - the name that programs catch
    """A call that was removed; the message says what replaces it."""


def require_state(holds: bool, subject: object, expected: str) -> None:
    """Raises where code of this package calls ``subject`` in the wrong state.

    Unlike ``assert``, it does so under ``python -O`` too.

    Raises:
        CallOrderError: It is not.
    """
    if not holds:
        raise CallOrderError(
            f"{subject!r}: expected {expected}. This is a fault of deepspeed, and this rank must not go on: start "
            "again from the last checkpoint, and report the traceback"
        )
