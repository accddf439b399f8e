"""What a failed run of several ranks looks like to the test that started it."""

from dataclasses import dataclass

OUTPUT_TAIL = 4000


@dataclass(frozen=True)
class RankReport:
    """What is known about one rank at the end of a failed run.

    Attributes:
        rank: Its number.
        outcome: One line: "finished", "raised ValueError: ...", "still running", "died of SIGSEGV".
        detail: Traceback of an exception, or stacks of all threads of a rank that hung or crashed.
        output: What the rank wrote to stdout and stderr during the run.
        exception: The exception itself if it could be sent, else None.
        when: Monotonic time of the failure, None if it did not fail by itself.
    """

    rank: int
    outcome: str
    detail: str = ""
    output: str = ""
    exception: BaseException | None = None
    when: float | None = None


class RanksFailed(AssertionError):
    """At least one rank raised. The message shows every rank, the one that failed first on top.

    Attributes:
        reports: One :class:`RankReport` per rank, ordered by rank.
        first: The report of the rank that failed first.
    """

    def __init__(self, headline: str, reports: list[RankReport]) -> None:
        self.reports = sorted(reports, key=lambda report: report.rank)
        ordered = sorted(self.reports, key=lambda report: (report.when is None, report.when or 0.0, report.rank))
        self.first = ordered[0]
        super().__init__("\n".join([headline, *(_section(report) for report in ordered)]))


class RankDied(RanksFailed):
    """A worker process ended in the middle of a run (a crash, os._exit, the out-of-memory killer)."""


class RanksTimedOut(RanksFailed):
    """A run did not finish in time; the message has the stacks of every rank."""


def _section(report: RankReport) -> str:
    lines = [f"--- rank {report.rank}: {report.outcome}"]
    if report.detail:
        lines.append(report.detail.rstrip())
    if report.output.strip():
        kept = report.output.strip()[-OUTPUT_TAIL:]
        lines += [f"output of rank {report.rank}:", *("    " + line for line in kept.splitlines())]
    return "\n".join(lines)
