"""Names of transfers and updates in a profile of torch: ``ZeRO::gather layers.0``, one range for each bucket."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

from torch.autograd import profiler
from torch.profiler import record_function

if TYPE_CHECKING:
    from deepspeed.zero.bucket import Bucket

_Method = TypeVar("_Method", bound=Callable[..., Any])
_NO_RANGE = nullcontext()


def range_of(work: str, bucket: Bucket) -> AbstractContextManager[Any]:
    """Returns a context whose work on a bucket has a name in profiles: ``work`` and the bucket's module."""
    if not profiler._is_profiler_enabled:  # record_function takes microseconds without a profiler too
        return _NO_RANGE
    return record_function(f"ZeRO::{work} {bucket.module_name}")


def in_profile(work: str) -> Callable[[_Method], _Method]:
    """Decorates a method of a bucket, or of its gradients, with :func:`range_of`."""

    def decorate(method: _Method) -> _Method:
        @wraps(method)
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not profiler._is_profiler_enabled:
                return method(self, *args, **kwargs)
            with range_of(work, getattr(self, "bucket", self)):
                return method(self, *args, **kwargs)

        return run  # type: ignore[return-value]

    return decorate
