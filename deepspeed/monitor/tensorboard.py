"""``tensorboard``: event files for TensorBoard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deepspeed.monitor.sink import Event, Monitor, log_folder, require_package

FLUSH_SECONDS = 10
"""TensorBoard's own thread writes at least this often."""


class TensorBoardMonitor(Monitor):
    """Writes event files below ``<output_path>/<job_name>``.

    Args:
        tensorboard_config: The section: ``enabled``, ``output_path``, ``job_name``.
    """

    section = "tensorboard"

    def __init__(self, tensorboard_config: Any) -> None:
        super().__init__(tensorboard_config.enabled)
        if self.enabled:
            require_package("tensorboard", self.section)
        self.output_path = tensorboard_config.output_path
        self.job_name = tensorboard_config.job_name
        self.log_dir = log_folder(tensorboard_config)
        self.summary_writer: Any = None

    def _open(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.summary_writer = SummaryWriter(log_dir=str(self.log_dir), flush_secs=FLUSH_SECONDS)

    def _write(self, events: Sequence[Event]) -> None:
        for name, value, step in events:
            self.summary_writer.add_scalar(name, value, step)

    def _flush(self) -> None:
        self.summary_writer.flush()

    def _close(self) -> None:
        self.summary_writer.close()
