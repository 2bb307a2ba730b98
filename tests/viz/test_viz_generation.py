"""Pictures of a generation, from a hand-made one."""

import html.parser
import io
import re

import pytest
from rich.console import Console

from specjax.decode import Completion, Generation, Origin, Stats
from specjax.viz import generation_html, generation_rich, summary_line

PIECES = ("<script>", "alert('x')", "</script>", ' & "so" on', "[bold]", "\n")
ORIGINS = (
    Origin.PLAIN,
    Origin.ACCEPTED,
    Origin.CORRECTION,
    Origin.ACCEPTED,
    Origin.BONUS,
    Origin.PLAIN,
)


def _completion(pieces, origins, **changes):
    facts = dict(
        id=0,
        prompt_ids=(1,),
        ids=tuple(range(len(pieces))),
        text="".join(pieces),
        logprobs=(-1.0,) * len(pieces),
        origins=tuple(int(o) for o in origins),
        finish_reason="length",
        error=None,
        stats=Stats(4, 2, 3, 2, 6, (2, 1), (2, 1), (1, 1)),
    )
    return Completion(**(facts | changes))


@pytest.fixture
def generation():
    one = _completion(PIECES, ORIGINS)
    other = _completion((), (), finish_reason="error", error="logits <nan> & gone")
    return Generation((one, other), (PIECES, ()), 0.5)


class _Reader(html.parser.HTMLParser):
    """Collects tags, and texts with their innermost title; checks nesting."""

    def __init__(self, source):
        super().__init__()
        self.open, self.tags, self.marked = [], set(), []
        self.feed(source)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.open.append((tag, dict(attrs).get("title")))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        self.marked.append((data, self.open[-1][1]))


def test_html_escapes_every_text(generation):
    source = generation_html(generation)
    assert source == generation._repr_html_()
    read = _Reader(source)
    assert not read.open
    assert read.tags <= {"div", "span", "b"}
    assert "<script" not in source and "<nan>" not in source
    text = "".join(data for data, _ in read.marked)
    assert "".join(PIECES) in text and "logits <nan> & gone" in text


def test_html_marks_each_origin(generation):
    marked = _Reader(generation_html(generation)).marked
    titles = dict(marked)
    assert titles[PIECES[1]] == titles[PIECES[3]] == "accepted draft"
    assert titles[PIECES[2]] == "correction" and titles[PIECES[4]] == "bonus"
    assert titles[PIECES[0]] is None
    legend = [data for data, _ in marked]
    for name in ("plain", "accepted draft", "correction", "bonus"):
        assert name in legend


def test_corrections_differ_in_more_than_colour(generation):
    source = generation_html(generation)
    (style,) = set(re.findall(r'style="([^"]*)" title="correction"', source))
    assert "underline" in style


@pytest.mark.parametrize("colour", [None, "truecolor"])
def test_rich_on_a_console(generation, colour):
    out = io.StringIO()
    console = Console(file=out, width=200, color_system=colour, force_terminal=True)
    console.print(generation)
    text = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())
    assert "<script>alert('x')</script> & \"so\" on[bold]" in text  # no markup is read
    assert "logits <nan> & gone" in text and summary_line(generation) in text
    assert ("\x1b[" in out.getvalue()) == (colour is not None)
    assert (
        Console(file=io.StringIO(), width=20).print(generation_rich(generation)) is None
    )


def test_rich_marks_each_origin(generation):
    _, text, *_ = generation_rich(generation).renderables
    styles = {text.plain[span.start : span.end]: str(span.style) for span in text.spans}
    assert styles[PIECES[1]] == styles[PIECES[3]] != styles[PIECES[2]]
    assert "underline" in styles[PIECES[2]] and PIECES[4] in styles
    assert PIECES[0] not in styles or not styles[PIECES[0]]


def test_repr_is_the_texts_and_a_summary(generation):
    texts = ["".join(PIECES), ""]
    assert repr(generation) == "\n\n".join([*texts, summary_line(generation)])


def test_the_summary_has_the_numbers(generation):
    line = summary_line(generation)
    assert "6 tokens in 0.50 s (12.0 tokens/s)" in line
    assert "8 passes" in line and "1.50 tokens/pass" in line
    assert "4 of 6 drafts accepted (67%)" in line


def test_a_generation_without_drafts_or_time():
    idle = _completion((), (), stats=Stats(0, 0, 0, 0, 0, (), (), ()))
    generation = Generation((idle,), ((),), 0.0)
    for source in (repr(generation), generation._repr_html_()):
        assert "0 tokens" in source and "drafts accepted" not in source
