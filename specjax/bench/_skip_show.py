"""Showing and writing what a search for a self-draft found."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from specjax import theory
from specjax.bench._skip_costs import SkipCosts
from specjax.bench._skip_make import SkipRow, SkipSearchResult
from specjax.models import LayerSkip

_FORMAT = "specjax layer skip 1"


def render_skip_search(result: SkipSearchResult) -> Group:
    """Makes tables and remarks for a terminal.

    Args:
      result: what was found.

    Returns:
      Something that rich prints.
    """
    settings = result.settings
    seen, unseen = result.n_positions
    at = f"T={settings.temperature:g}" if settings.temperature else "greedy"
    title = Text(
        f"{settings.target}, {settings.dtype}, {at}: {result.n_evaluations} subsets of "
        f"{2 * result.n_layers} sublayers on {seen} positions, {unseen} held out",
        style="bold",
    )
    remarks = [Text(line) for line in skip_remarks(result)]
    under = Text("acceptance of the best, by class of text", style="bold")
    tables = _draft_table(result), under, _class_table(result)
    code = Text(as_python(result.best), style="bold")
    return Group(title, _cost_line(result.costs), *tables, *remarks, code)


def skip_remarks(result: SkipSearchResult) -> list[str]:
    """Says in words what the figures mean, also where nothing was gained.

    Args:
      result: what was found.

    Returns:
      Sentences, the verdict first.
    """
    best, draft = result.best, result.best.draft
    v = result.costs.verify_cost
    need = theory.break_even_acceptance(draft.gamma, draft.cost, v)
    rates = f"accepted at {draft.acceptance:.3f}, held out at {best.held_out:.3f}"
    if draft.speedup <= 1:
        least = f"at that cost drafts pay from {need:.3f} on"
        if need > 1:
            least = "at that cost no acceptance pays"
        lines = [
            f"Nothing that was tried beats plain decoding. The best would run at "
            f"{draft.speedup:.3f} of its speed ({best.held_out_speedup:.3f} on "
            f"held-out texts): {rates}, c = {draft.cost:.3f}; {least}. Models that "
            "were not trained with layers left out seldom have such a subset. Decode "
            "plainly, or with another drafter."
        ]
    elif best.held_out_speedup <= 1:
        lines = [
            f"What was found suits the texts of the search alone: predicted "
            f"{draft.speedup:.3f} of plain decoding's speed there, and "
            f"{best.held_out_speedup:.3f} on held-out texts ({rates}). Do not count on "
            "it: search on more prompts, or decode plainly."
        ]
    else:
        lines = [
            f"Predicted {draft.speedup:.3f} times plain decoding on the texts of the "
            f"search, {best.held_out_speedup:.3f} times on held-out texts: {rates}; "
            f"drafts pay from {need:.3f} on. The loop and the rule take a little of it."
        ]
    return lines + [_about_ranges(result.best_range)]


def _about_ranges(row: SkipRow | None) -> str:
    if row is None:
        return (
            "No range of whole blocks was tried: the evaluations were spent on single "
            "sublayers. Give more."
        )
    blocks, draft = row.draft.skip.ff, row.draft
    return (
        f"Best range of whole blocks: layer_skip:{blocks[0]}-{blocks[-1]} at gamma "
        f"{draft.gamma}, predicted {draft.speedup:.3f} ({row.held_out_speedup:.3f} on "
        "held-out texts)."
    )


def as_python(row: SkipRow) -> str:
    """Spells a draft as the call that makes its drafter."""
    attention, ff = row.draft.skip
    return (
        f"drafters.layer_skip(model, {row.draft.gamma}, attention={attention}, ff={ff})"
    )


def _cost_line(costs: SkipCosts) -> Text:
    v = costs.verify_cost
    shown = f"any drafts: {v:.2f}"
    if isinstance(v, tuple):
        shown = f"0, 1, ... drafts: {' '.join(f'{x:.2f}' for x in v)}"
    mean = lambda parts: sum(parts) / len(parts)
    return Text(
        f"of a one-row pass a block's attention takes {mean(costs.attention):.4f}, its "
        f"feed-forward network {mean(costs.ff):.4f}; v of {shown}"
    )


def _draft_table(result: SkipSearchResult) -> Table:
    names = ("left out", "att.", "ff", "accepted", "held out", "c", "gamma")
    table = _table(*names, "speed-up", "held out", "")
    for row in result.rows:
        draft, marks = row.draft, []
        marks += ["best"] if row == result.best else []
        marks += ["range"] if row == result.best_range else []
        table.add_row(
            str(draft.size),
            str(len(draft.skip.attention)),
            str(len(draft.skip.ff)),
            f"{draft.acceptance:.3f}",
            f"{row.held_out:.3f}",
            f"{draft.cost:.3f}",
            str(draft.gamma),
            f"{draft.speedup:.3f}",
            f"{row.held_out_speedup:.3f}",
            ", ".join(marks),
        )
    return table


def _class_table(result: SkipSearchResult) -> Table:
    table = _table("class", "accepted", "held out")
    cell = lambda rate: "-" if rate is None else f"{rate:.3f}"
    for name, rates in result.classes.items():
        table.add_row(name, *map(cell, rates))
    return table


def _table(*columns: str) -> Table:
    table = Table()
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left")
    return table


def skip_record(result: SkipSearchResult) -> dict[str, Any]:
    """Turns a result into what JSON holds.

    Args:
      result: what was found.

    Returns:
      Numbers, names and lists. ``skip`` holds the keyword arguments, and ``gamma`` the
      draft length, of ``drafters.layer_skip`` for the best draft.
    """
    best, costs = result.best, result.costs
    pairs = result.classes.items()
    return {
        "format": _FORMAT,
        "skip": _as_lists(best.draft.skip),
        "gamma": best.draft.gamma,
        "pays": best.draft.speedup > 1 and best.held_out_speedup > 1,
        "best": _as_record(best),
        "best_range": _as_record(result.best_range) if result.best_range else None,
        "rows": [_as_record(row) for row in result.rows],
        "classes": {
            name: {"acceptance": seen, "held_out_acceptance": unseen}
            for name, (seen, unseen) in pairs
        },
        "costs": dataclasses.asdict(costs),
        "n_layers": result.n_layers,
        "n_evaluations": result.n_evaluations,
        "n_positions": {
            "search": result.n_positions[0],
            "held_out": result.n_positions[1],
        },
        "settings": dataclasses.asdict(result.settings),
        "remarks": skip_remarks(result),
    }


def write_skip_search(path: str | os.PathLike[str], result: SkipSearchResult) -> None:
    """Writes ``skip_record`` as one JSON file, whole or not at all.

    Args:
      path: the file; one that is there is replaced.
      result: what was found.

    Raises:
      OSError: it cannot be written.
    """
    path = Path(path)
    text = json.dumps(skip_record(result), indent=2, allow_nan=False) + "\n"
    scratch = path.with_name(path.name + ".tmp")
    with scratch.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(scratch, path)


def _as_lists(skip: LayerSkip) -> dict[str, list[int]]:
    return {name: list(blocks) for name, blocks in skip._asdict().items()}


def _as_record(row: SkipRow) -> dict[str, Any]:
    draft = row.draft
    return {
        "skip": _as_lists(draft.skip),
        "acceptance": draft.acceptance,
        "held_out_acceptance": row.held_out,
        "cost_ratio": draft.cost,
        "gamma": draft.gamma,
        "speedup": draft.speedup,
        "held_out_speedup": row.held_out_speedup,
    }
