"""Every mistake planted in the decode loop is caught by the check that should."""

import pytest

from specjax.testing.loop_checks import CHECKS
from specjax.testing.loop_mutants import LOOPS, fault_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.xdist_group("loop_mutants"),
]


@pytest.mark.parametrize("check", CHECKS)
def test_the_loop_has_no_fault(check):
    assert fault_of(None, check) is None


@pytest.mark.parametrize("name", LOOPS)
def test_a_mutant_does_not_survive(name, record_property):
    mutant = LOOPS[name]
    assert mutant.name == name and mutant.what
    fault = fault_of(mutant, mutant.check)
    record_property("mutant", [name, mutant.check, str(fault)[:60]])
    assert fault is not None
