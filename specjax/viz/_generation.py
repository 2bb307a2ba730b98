"""Shows which tokens were drafted and kept, corrected, or a bonus."""

import html
import math
from typing import TYPE_CHECKING

from specjax.decode._state import Origin

if TYPE_CHECKING:
    from rich.console import Group

    from specjax.decode import Completion, Generation, Stats

# Each origin: name in the legend, CSS, rich style. Accepted and corrected differ in
# more than hue (underline), so that the picture works without colour vision.
_LOOKS = {
    Origin.PLAIN: ("plain", "", ""),
    Origin.ACCEPTED: ("accepted draft", "background:#c9ecd0;color:#111", "on green4"),
    Origin.CORRECTION: (
        "correction",
        "background:#ffd9b3;color:#111;text-decoration:underline",
        "underline on dark_orange3",
    ),
    Origin.BONUS: ("bonus", "background:#cfe0ff;color:#111", "on dodger_blue3"),
}

_RULE = "margin:.6em 0;padding:.5em .8em;border-left:3px solid #999"


def summary_line(generation: "Generation") -> str:
    """Returns one line of statistics.

    Args:
      generation: what ``generate`` gave.

    Returns:
      Tokens, seconds, tokens a second, tokens a pass and the accepted fraction.
    """
    n_tokens = sum(len(c.ids) for c in generation)
    speed = n_tokens / generation.seconds if generation.seconds else float("nan")
    return (
        f"{n_tokens} tokens in {generation.seconds:.2f} s ({speed:.1f} tokens/s) | "
        + _stats_text(generation.stats)
    )


def _stats_text(stats: "Stats") -> str:
    parts = [f"{stats.passes} passes", f"{stats.tokens_per_pass:.2f} tokens/pass"]
    if stats.verified:
        parts.append(
            f"{stats.accepted} of {stats.verified} drafts accepted "
            f"({100 * stats.accepted_fraction:.0f}%)"
        )
        by_position = " ".join(
            "-" if math.isnan(a) else f"{a:.2f}" for a in stats.acceptance_at
        )
        parts.append(f"acceptance by position {by_position}")
    return " | ".join(parts)


def generation_html(generation: "Generation") -> str:
    """Renders completions as HTML, each token marked by where it came from.

    Args:
      generation: what ``generate`` gave.

    Returns:
      A self-contained fragment; all text is escaped.
    """
    legend = " ".join(
        f'<span style="{css};padding:0 .3em">{name}</span>'
        for name, css, _ in _LOOKS.values()
    )
    blocks = []
    for completion, pieces in zip(generation, generation.pieces, strict=True):
        spans = "".join(
            _span(piece, origin)
            for piece, origin in zip(pieces, completion.origins, strict=True)
        )
        blocks.append(
            f'<div style="{_RULE};white-space:pre-wrap">{spans}</div>'
            f'<div style="font-size:85%;opacity:.75">{_caption(completion)}</div>'
        )
    return (
        f'<div><div style="font-size:85%">{legend}</div>{"".join(blocks)}'
        f'<div style="font-size:85%"><b>{html.escape(summary_line(generation))}</b>'
        "</div></div>"
    )


def _span(piece: str, origin: int) -> str:
    name, css, _ = _LOOKS[Origin(origin)]
    text = html.escape(piece)
    return f'<span style="{css}" title="{name}">{text}</span>' if css else text


def _caption(completion: "Completion") -> str:
    text = f"{len(completion.ids)} tokens, {completion.finish_reason}"
    if completion.error:
        text += f": {completion.error}"
    return html.escape(f"{text} | {_stats_text(completion.stats)}")


def generation_rich(generation: "Generation") -> "Group":
    """Renders completions for a terminal through ``rich``.

    Args:
      generation: what ``generate`` gave.

    Returns:
      A rich renderable.
    """
    from rich.console import Group
    from rich.text import Text

    parts: list[Text] = []
    for completion, pieces in zip(generation, generation.pieces, strict=True):
        text = Text()
        for piece, origin in zip(pieces, completion.origins, strict=True):
            text.append(piece, style=_LOOKS[Origin(origin)][2])
        text.append("\n" + html.unescape(_caption(completion)), style="dim")
        parts.append(text)
    legend = Text("  ").join(
        Text(f" {name} ", style=style) for name, _, style in _LOOKS.values()
    )
    return Group(legend, *parts, Text(summary_line(generation), style="bold"))
