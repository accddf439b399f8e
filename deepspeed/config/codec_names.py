"""Names of the codecs that a configuration can choose.

What they are stands in ``comm.codecs.table``, a row for each. The names stand here because the configuration is below
communication and must not load it.
"""

from __future__ import annotations

GRADIENT_CODECS = ("sign", "int8", "int4")
"""For ``communication_compression.gradients``; ``ds_plan`` compares them."""

PLAIN_CODECS = ("int8", "int4")
"""Those that are good enough without error feedback, for ``warm_up``, islands and ``"auto"``."""
