"""Tree passes, and the rules that are for trees alone, for chips that are not here.

uv run --group aot pytest -m aot -n 1 tests/aot
"""

import aot_worker
import pytest
from test_aot import BATCH, MIB, WIDTH, compiled, copied, reports_of

from specjax.testing.aot import TARGETS

pytestmark = [pytest.mark.aot, pytest.mark.timeout(1800)]

CASES = {
    # XLA's partitioner ends the process over a gather of traversal on split logits.
    "v5e:2x2": ("coupled",),
    "h200:1": ("coupled", "traversal"),
}
PAIRS = [(target, rule) for target, rules in CASES.items() for rule in rules]


@pytest.mark.parametrize(("target", "rule"), PAIRS)
def test_a_tree_pass_copies_no_keys_and_values(target, rule):
    """Its path is moved where it stands, and the state takes its own place."""
    cases = tuple(f"llama/{rule}/tree" for rule in CASES[target])
    (report,) = reports_of(compiled(target, cases)[f"llama/{rule}/tree"])
    assert aot_worker.TREE.n_nodes == WIDTH - 1
    assert report.n_aliased == report.n_state and not report.moved
    assert report.argument_bytes + report.temp_bytes < TARGETS[target].memory_bytes
    config, _ = aot_worker.MODELS["llama"]
    rest = report.temp_bytes - copied(report, config)
    # Scores, residuals and draws of every node, whole on each device: the rules for
    # trees are not split over the vocabulary.
    assert rest < 16 * BATCH * WIDTH * config.vocab_size * 4 + 12 * MIB
