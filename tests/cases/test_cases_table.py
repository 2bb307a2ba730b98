"""The table of cases names tests that exist, and all of them."""

import ast
import pathlib
import re

HERE = pathlib.Path(__file__).parent
#: Cases of each section.
SECTIONS = {
    "Greedy equality, ties, numerics": 6,
    "Sampling correctness": 7,
    "Penalties, processors, grammar": 4,
    "EOS, stop, length": 5,
    "KV cache and rollback": 6,
    "What comes back": 5,
}


def _rows():
    """(section, tag, source, where) of each case."""
    section, rows = None, []
    for line in (HERE / "README.md").read_text().splitlines():
        if line.startswith("## "):
            section = line[3:].strip()
        if line.startswith("| **"):
            tag, source, _, where = (c.strip() for c in line.strip("|").split("|"))
            rows.append((section, tag.strip("*"), source, where))
    return rows


def _tests(path):
    tree = ast.parse(path.read_text())
    return {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def _named(where):
    return re.findall(r"`([\w/]+\.py)::(\w+)`", where)


def test_every_case_is_there_once():
    rows = _rows()
    tags = [tag for _, tag, _, _ in rows]
    assert len(set(tags)) == len(tags)
    counts = {s: sum(r[0] == s for r in rows) for s in {r[0] for r in rows}}
    assert counts == SECTIONS
    for _, tag, source, where in rows:
        assert source, tag
        assert _named(where) or re.match(r"later: \w", where), tag


def test_every_named_test_exists():
    for _, tag, _, where in _rows():
        for file, name in _named(where):
            assert name in _tests(HERE.parent / file), f"{tag}: {file}::{name}"


def test_every_replay_is_in_the_table_and_names_its_source():
    named = {pair for *_, where in _rows() for pair in _named(where)}
    for path in sorted(HERE.glob("test_cases_*.py")):
        if path.name == pathlib.Path(__file__).name:
            continue
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                assert (f"cases/{path.name}", node.name) in named, node.name
                assert re.match(r"[\w.-]+(.*)#\d+", ast.get_docstring(node) or "")
