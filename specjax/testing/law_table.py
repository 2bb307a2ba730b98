"""Tables of what tests recorded: the largest error of each rule's law, and mutants.

A test records with pytest's ``record_property("law", error.record())``, or with
``record_property("mutant", [name, where, what found it])``, which works under
pytest-xdist too; a conftest that imports ``pytest_terminal_summary`` shows the tables
at the end of the run.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple


class LawError(NamedTuple):
    """One law that was compared with the exact one.

    Attributes:
      rule: name of the rule.
      topology: shape of the proposals.
      proposal: how they were made.
      dtype: precision the rule computed in.
      against: whose law it was compared with.
      error: total variation between the two.
    """

    rule: str
    topology: str
    proposal: str
    dtype: str
    against: str
    error: float

    def record(self) -> list[str | float]:
        """Returns the fields as plain values that can be sent between processes."""
        return [*(str(field) for field in self[:-1]), float(self.error)]


def law_table(errors: Iterable[LawError]) -> str:
    """Lays out the largest error of each kind, one line each.

    Args:
      errors: any number of comparisons; equal kinds are put together.

    Returns:
      The lines, with a header; empty when there is no error to show.
    """
    largest: dict[tuple[str, ...], tuple[float, int]] = {}
    for error in errors:
        kind = tuple(error[:-1])
        worst, n = largest.get(kind, (0.0, 0))
        largest[kind] = (max(worst, error.error), n + 1)
    if not largest:
        return ""
    lines = [(*LawError._fields[:-1], "laws", "largest TV")]
    lines += [
        (*kind, str(n), f"{worst:.1e}") for kind, (worst, n) in sorted(largest.items())
    ]
    return _columns(lines, n_right=2)


def _columns(lines: Sequence[Sequence[str]], *, n_right: int) -> str:
    """Lays out lines of cells, the last few columns to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i >= len(widths) - n_right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Shows the tables once, whichever conftests import this hook.

    Args:
      terminalreporter: pytest's.
    """
    if getattr(terminalreporter, "shows_laws", False):
        return
    terminalreporter.shows_laws = True
    reports = [r for kind in terminalreporter.stats.values() for r in kind]
    recorded = [
        (name, value)
        for report in reports
        for name, value in getattr(report, "user_properties", ())
        if getattr(report, "when", "") == "call"
    ]
    table = law_table(LawError(*value) for name, value in recorded if name == "law")
    if table:
        terminalreporter.section("laws of verify rules, against the exact ones")
        terminalreporter.write_line(table)
    mutants = sorted(value for name, value in recorded if name == "mutant")
    if mutants:
        terminalreporter.section("planted mistakes, and what found them")
        lines = [("mutant", "looked for by", "found"), *mutants]
        terminalreporter.write_line(_columns(lines, n_right=0))
