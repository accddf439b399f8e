"""How long a collective may take."""

from __future__ import annotations

import os
from datetime import timedelta

from deepspeed.errors import CommunicationError


def default_timeout() -> timedelta:
    """Returns how long a collective may take: ``DEEPSPEED_TIMEOUT`` minutes, 10 if the variable is not set.

    Raises:
        CommunicationError: The variable is no number above 0.
    """
    text = os.environ.get("DEEPSPEED_TIMEOUT", "10")
    try:
        minutes = float(text)
    except ValueError:
        minutes = 0.0
    if not 0 < minutes < float("inf"):
        raise CommunicationError(
            f"DEEPSPEED_TIMEOUT must be a number of minutes above 0, but is {text!r}; correct or unset the variable"
        )
    return timedelta(minutes=minutes)
