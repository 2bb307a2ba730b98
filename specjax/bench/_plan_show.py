"""Showing a plan in a terminal."""

from collections.abc import Sequence

import jax
from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from specjax.bench._plan import SpeculationPlan

_COLUMNS = 10


def describe(plan: SpeculationPlan) -> str:
    """Says in one line what the plan is for.

    Args:
      plan: the plan.

    Returns:
      Target, drafter, device and number format.
    """
    settings = plan.settings
    if settings.device is not None:
        where = f"{settings.device.name} (roofline), {settings.dtype or 'bfloat16'}"
    elif plan.costs.one_row_s is None and not any(c.profile.runs for c in plan.classes):
        where = "numbers as given"
    else:
        where = f"{jax.devices()[0].device_kind} (measured), "
        where += settings.dtype or "float32"
    return f"{settings.target}, {settings.drafter}, {where}"


def render_plan(plan: SpeculationPlan) -> Group:
    """Makes tables and advice for a terminal.

    Args:
      plan: the plan.

    Returns:
      Something that rich prints.
    """
    parts = [*_speed_table(plan), *_acceptance_table(plan), *_cost_table(plan)]
    if plan.costs.by_batch:
        parts += _batch_table(plan)
    lines = []
    for one in plan.classes:
        lines.append(Text(f"{one.profile.name}:", style="bold"))
        lines += [Padding(Text(line), (0, 0, 0, 2)) for line in one.advice]
    return Group(*parts, *lines)


def _speed_table(plan: SpeculationPlan) -> tuple[Text, Table]:
    gamma = plan.settings.gamma
    title, table = _table(
        f"{describe(plan)}: speed-up over plain decoding",
        "class",
        "gamma",
        "tokens/pass",
        "predicted",
        "measured",
        "efficiency",
        "best gamma",
        "speed-up there",
    )
    for one in plan.classes:
        best = (str(one.best.gamma), f"{one.best.speedup:.3f}")
        rows = zip(one.profile.runs, one.efficiency, strict=True)
        found = {run.gamma: (run, efficiency) for run, efficiency in rows}
        for g in sorted({gamma, *found}):
            tau, measured, efficiency = "-", "-", "-"
            if g in found:
                run = found[g][0]
                tau, measured = f"{run.tokens_per_pass:.2f}", f"{run.speedup:.3f}"
                efficiency = f"{found[g][1]:.3f}"
            predicted = f"{one.curve[g]:.3f}"
            name = one.profile.name if g == gamma else ""
            end = best if g == gamma else ("", "")
            table.add_row(name, str(g), tau, predicted, measured, efficiency, *end)
    return title, table


def _acceptance_table(plan: SpeculationPlan) -> tuple[Text, Table]:
    shown = _some(range(1, plan.max_gamma + 1))
    title, table = _table(
        "acceptance by position, where all earlier drafts were accepted",
        "class",
        "drafted",
        *map(str, shown),
    )
    for one in plan.classes:
        given = one.profile.acceptance
        if not isinstance(given, tuple):
            given = (given,) * plan.max_gamma
        cells = [f"{given[j - 1]:.2f}" if j <= len(given) else "-" for j in shown]
        table.add_row(one.profile.name, f"{one.profile.drafted:.0%}", *cells)
    return title, table


def _cost_table(plan: SpeculationPlan) -> tuple[Text, Table]:
    costs = plan.costs
    c = f"c = {costs.cost_ratio:.2g} one-row passes a draft"
    if costs.one_row_s is not None:
        c += f", of {1e3 * costs.one_row_s:.3g} ms each"
    shown = _some(range(1, plan.max_gamma + 1))
    title, table = _table(f"cost of passes: {c}", "gamma", *map(str, shown))
    v = costs.verify_cost
    cells = [f"{v[g] if isinstance(v, tuple) else v:.2f}" for g in shown]
    table.add_row("v", *cells)
    return title, table


def _batch_table(plan: SpeculationPlan) -> tuple[Text, Table]:
    gamma, by_batch = plan.settings.gamma, plan.costs.by_batch
    shown = _some(sorted(by_batch))
    title, table = _table(
        f"predicted by batch, gamma {gamma}", "batch", *map(str, shown)
    )
    table.add_row("v", *(f"{by_batch[b]:.2f}" for b in shown))
    for one in plan.classes:
        cells = (f"{one.by_batch[b]:.2f}" for b in shown)
        table.add_row(f"{one.profile.name}", *cells)
    return title, table


def _table(title: str, *columns: str) -> tuple[Text, Table]:
    """Makes a table and its title, which may be wider."""
    table = Table()
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left")
    return Text(title, style="bold"), table


def _some(numbers: Sequence[int]) -> list[int]:
    """Chooses as many as a line has room for, closer where they are small."""
    numbers = list(numbers)
    if len(numbers) <= _COLUMNS:
        return numbers
    n, last = _COLUMNS - 1, len(numbers) - 1
    picked = {round(last ** (i / n)) - 1 + (i == n) for i in range(n + 1)}
    return [numbers[i] for i in sorted(picked | set(range(4)))]
