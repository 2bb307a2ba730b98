"""Imports go one way, and one room compiles."""

import ast
import pathlib

import pytest

import specjax

ROOT = pathlib.Path(specjax.__file__).parent

# Which rooms a room may import, itself and ``typing`` always being allowed.
ALLOWED = {
    "typing": set(),
    "ops": {"trees"},
    "cache": {"ops"},
    "sampling": {"ops", "trees"},
    "text": set(),
    "theory": set(),
    "trees": set(),
    "models": {"cache", "sampling", "ops", "trees"},
    "drafters": {"sampling", "models", "ops", "trees"},
    "verify": {"sampling", "ops", "trees"},
    "sharding": {"models", "cache", "ops"},
    "weights": {"models", "text", "sharding", "ops"},
    "decode": {
        "cache",
        "drafters",
        "models",
        "ops",
        "sampling",
        "sharding",
        "text",
        "trees",
        "verify",
        "weights",
    },
}
# Above the loop: they may import anything below.
TOP = {"viz", "batch", "bench", "testing", "train"}
# ``decode`` shows its results through ``viz``, found when they are shown; the
# definition of ``ops.verify_sample`` is what the warp and the rules do.
LAZY = {("decode", "viz"), ("ops", "sampling"), ("ops", "verify")}


def _modules():
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        room = parts[0]
        yield room, path, ast.parse(path.read_text("utf-8"))


def _is_type_checking(node):
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def _imports(tree):
    """Gives (module, whether inside a function) of each import that runs."""
    stack = [(node, False) for node in tree.body]
    while stack:
        node, inside = stack.pop()
        if _is_type_checking(node):
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            if node.module == "specjax":
                yield from ((f"specjax.{alias.name}", inside) for alias in node.names)
            else:
                yield node.module or "", inside
        function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        stack += [(child, inside or function) for child in ast.iter_child_nodes(node)]


FOUND = [
    (room, path, module, inside)
    for room, path, tree in _modules()
    for module, inside in _imports(tree)
]


def test_every_room_has_a_place():
    rooms = {room for room, *_ in FOUND} - {"__init__"}
    assert rooms <= set(ALLOWED) | TOP


@pytest.mark.parametrize("room", list(ALLOWED))
def test_a_room_imports_only_what_lies_below(room):
    allowed = ALLOWED[room] | {room, "typing"}
    bad = []
    for here, path, module, inside in FOUND:
        package, _, rest = module.partition(".")
        if here != room or package != "specjax":
            continue
        there = rest.partition(".")[0]
        if there in allowed or (inside and (here, there) in LAZY):
            continue
        bad.append(f"{path.relative_to(ROOT)}: {module}")
    assert not bad


def test_typing_imports_nothing_of_specjax():
    assert not [m for room, _, m, _ in FOUND if room == "typing" and "specjax" in m]


def test_drafters_and_rules_never_import_each_other():
    for room, other in (("drafters", "verify"), ("verify", "drafters")):
        assert other not in ALLOWED[room]


def test_private_modules_stay_in_their_room():
    """Another room of the loop imports a package, not the file behind it."""
    bad = []
    for here, path, module, _ in FOUND:
        parts = module.split(".")
        if here in TOP:
            continue
        if parts[0] == "specjax" and len(parts) > 2 and parts[1] != here:
            if any(part.startswith("_") for part in parts[2:]):
                bad.append(f"{path.relative_to(ROOT)}: {module}")
    assert not bad


def test_nobody_imports_scripts_or_tests():
    outside = {"scripts", "tests", "notebooks", "pytest", "hypothesis", "torch"}
    assert not [(p, m) for _, p, m, _ in FOUND if m.split(".")[0] in outside]


def test_kernels_are_found_by_operations_when_they_are_chosen():
    """So that Pallas is no part of what ``import specjax`` needs."""
    kernels = [x for x in FOUND if x[2].partition(".")[0] == "kernels_pallas"]
    assert kernels and all(room == "ops" and inside for room, _, _, inside in kernels)


def test_the_library_does_not_import_its_test_helpers():
    bad = [p for room, p, m, _ in FOUND if "specjax.testing" in m and room != "testing"]
    assert not bad


def test_one_room_compiles():
    """``jax.jit`` is called in decode/_compiled.py, in ops and above the loop only."""
    bad = []
    for room, path, tree in _modules():
        if room in TOP | {"ops"} or path.name == "_compiled.py":
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node) == "jax.jit":
                bad.append(f"{path.relative_to(ROOT)}:{node.lineno}")
            if isinstance(node, ast.ImportFrom) and node.module == "jax":
                bad += [str(path) for alias in node.names if alias.name == "jit"]
    assert not bad
