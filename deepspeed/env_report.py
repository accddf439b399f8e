"""Prints the report of ``ds_report``, under the import path of upstream and by ``python -m deepspeed.env_report``."""

from __future__ import annotations

from deepspeed.cli.report import main as cli_main


def main(hide_operator_status: bool = False, hide_errors_and_warnings: bool = False) -> None:
    """Prints the report, without what can be used or without the warnings where these are hidden."""
    options = {"--hide_operator_status": hide_operator_status, "--hide_errors_and_warnings": hide_errors_and_warnings}
    cli_main([option for option, is_set in options.items() if is_set])


__all__ = ["cli_main", "main"]

if __name__ == "__main__":
    cli_main()
