import pytest

from specjax.testing.law_table import LawError


@pytest.fixture
def record_law(record_property):
    """Puts a comparison of laws into the table at the end of the run."""

    def record(rule, proposal, law, error, *, against="target", topology="chain"):
        error = LawError(rule.name, topology, proposal, str(law.dtype), against, error)
        record_property("law", error.record())

    return record
