"""Names of the codecs that a configuration can choose.

``comm.codecs.table`` defines them. The names are here because the configuration is in a lower layer than communication
and must not import it.
"""

from __future__ import annotations

GRADIENT_CODECS = ("sign", "int8", "int4")
"""For ``communication_compression.gradients``; ``ds_plan`` compares them."""

PLAIN_CODECS = ("int8", "int4")
"""Those that are good enough without error feedback, for ``warm_up``, islands and ``"auto"``."""
