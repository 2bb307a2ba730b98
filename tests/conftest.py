"""Settings of every test."""

import os
import shutil
import tempfile

import jax
import pytest

from specjax.testing.law_table import pytest_terminal_summary as pytest_terminal_summary


def pytest_configure(config):
    """Shares compiled programs among the tests and workers of one run.

    Programs of equal HLO are compiled once: most plans have the same prefill.
    """
    if hasattr(config, "workerinput"):
        config.jax_cache = config.workerinput["jax_cache"]
    else:
        config.jax_cache = tempfile.mkdtemp(prefix="specjax-tests-")
        config.add_cleanup(lambda: shutil.rmtree(config.jax_cache, ignore_errors=True))
    jax.config.update("jax_compilation_cache_dir", config.jax_cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    # Scripts and notebooks that tests start share it too.
    os.environ["JAX_COMPILATION_CACHE_DIR"] = config.jax_cache
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    """Hands the folder to a worker of pytest-xdist."""
    node.workerinput["jax_cache"] = node.config.jax_cache
