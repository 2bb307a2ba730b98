"""Self-drafts in int8 and int4, compiled for chips that are not here.

uv run --group aot pytest -m aot -n 1 tests/aot
"""

import aot_worker
import pytest
from test_aot import BATCH, MIB, WIDTH, compiled, copied, reports_of

from specjax.testing.aot import TARGETS

pytestmark = [pytest.mark.aot, pytest.mark.timeout(1800)]

# Groups of weights are laid out anew on TPUs, so only one scale a row is claimed there.
CASES = {"v5e:2x2": ("int8",), "h200:1": ("int8", "int4"), "h200:4": ("int4",)}
PAIRS = [(target, name) for target, names in CASES.items() for name in names]


@pytest.mark.parametrize(("target", "name"), PAIRS)
def test_no_weights_are_written_out(target, name):
    """A loop of draft steps and a pass holds little beside its arguments."""
    cases = tuple(f"llama/greedy/{name}" for name in CASES[target])
    (report,) = reports_of(compiled(target, cases)[f"llama/greedy/{name}"])
    assert report.n_aliased == report.n_state and not report.moved
    assert report.argument_bytes + report.temp_bytes < TARGETS[target].memory_bytes
    config, _ = aot_worker.MODELS["llama"]
    n = report.n_devices
    # As without drafts: logits of a pass four times over, beside kernels of the target
    # that a TPU lays out anew. The head alone would be 1 GiB in bfloat16.
    logits = BATCH * WIDTH * config.vocab_size * 4 // n
    least = 4 * logits + 12 * MIB
    assert report.temp_bytes - copied(report, config) < least
    assert least < config.vocab_size * config.width * 2 // n
