"""What happens to the other ranks of a pipeline when one fails in a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from deepspeed.comm.transports.transport import Transport
from deepspeed.errors import CommunicationError, DivergenceError, PipelineError
from deepspeed.parallel.pipe.data import DataError


class StageFailures:
    """Ends a call on every rank with the message of the first rank that fails in it.

    Args:
        job: All ranks.
        place: Returns where this rank is in a call with the given name, for messages.
    """

    def __init__(self, job: Transport, place: Callable[[str], str]) -> None:
        self._job = job
        self._place = place
        self._message = ""  # of the failure that ended the connections between the ranks

    def refuse_after_failure(self, call: str) -> None:
        """Raises PipelineError if an earlier call failed: the ranks are no longer connected."""
        if self._message:
            raise PipelineError(
                f"{call}: an earlier call failed, and the ranks are no longer connected. {self._message}. Start the "
                "job again, from its last checkpoint"
            )

    @contextmanager
    def shared(self, call: str) -> Iterator[None]:
        """Reports an exception of the block to all ranks; it ends the step and the connections of the ranks.

        Raises:
            PipelineError: The block raised, or another rank reported a failure; with the same message on every rank.
        """
        try:
            yield
        except (CommunicationError, DivergenceError) as error:
            is_reported = str(error).startswith(f"{call}: ")
            message = str(error) if is_reported else f"{self._place(call)}: {error}"
            self._message = message
            raise PipelineError(message) from (None if is_reported else error)
        except DataError:
            raise
        except Exception as error:
            what = str(error) if isinstance(error, PipelineError) else f"{type(error).__name__}: {error}"
            message = f"{self._place(call)}: {what}"
            if self._job.watch is not None:  # there are other ranks
                self._message = message
                self._job.watch.post_failure(message)
            raise PipelineError(message) from error
