from types import SimpleNamespace

from specjax.testing.law_table import LawError, law_table, pytest_terminal_summary

ERRORS = [
    LawError("block", "chain", "drawn", "float32", "target", 2e-8),
    LawError("block", "chain", "drawn", "float32", "target", 3e-7),
    LawError("block", "chain", "point", "float32", "target", 0.0),
]


def test_table_keeps_the_largest_error_of_a_kind():
    lines = law_table(ERRORS).splitlines()
    assert len(lines) == 3 and len({len(line) for line in lines}) == 1
    assert lines[0].split()[-2:] == ["largest", "TV"]
    assert lines[1].split() == "block chain drawn float32 target 2 3.0e-07".split()
    assert lines[2].split()[-2:] == ["1", "0.0e+00"]
    assert law_table([]) == ""


def test_summary_is_shown_once():
    record = SimpleNamespace(
        when="call", user_properties=[("law", ERRORS[0].record()), ("other", 1)]
    )
    shown = []
    reporter = SimpleNamespace(
        stats={"passed": [record], "warnings": [object()]},
        section=lambda title: shown.append(title),
        write_line=shown.append,
    )
    pytest_terminal_summary(reporter)
    pytest_terminal_summary(reporter)
    assert len(shown) == 2 and "2.0e-08" in shown[1]
