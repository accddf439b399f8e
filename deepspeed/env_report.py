"""The report of ``ds_report`` at upstream's import path; ``python -m deepspeed.env_report`` prints it too."""

from __future__ import annotations

from deepspeed.cli.report import main as cli_main


def main(hide_operator_status: bool = False, hide_errors_and_warnings: bool = False) -> None:
    """Prints the report.

    Args:
        hide_operator_status: Leave out what can be used and what not.
        hide_errors_and_warnings: Leave out the warnings.
    """
    given = {"--hide_operator_status": hide_operator_status, "--hide_errors_and_warnings": hide_errors_and_warnings}
    cli_main([option for option, is_given in given.items() if is_given])


__all__ = ["cli_main", "main"]

if __name__ == "__main__":
    cli_main()
