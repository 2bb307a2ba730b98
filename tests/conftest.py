"""Settings of every test."""

import gc
import os
import shutil
import tempfile

import jax
import pytest

from specjax.decode import forget_programs
from specjax.testing.law_table import pytest_terminal_summary as pytest_terminal_summary


def pytest_configure(config):
    """Shares compiled programs among the tests and workers of one run.

    Programs of equal HLO are compiled once: most plans have the same prefill. A folder
    that the environment names is kept, and serves the runs after this one too.
    """
    if hasattr(config, "workerinput"):
        config.jax_cache = config.workerinput["jax_cache"]
    elif named := os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        config.jax_cache = named
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


def pytest_runtest_teardown(item, nextitem):
    """Drops compiled programs where a module ends, once a worker holds many.

    Each maps some pages of code, and a process may have 65530 mappings on Linux: beyond
    that, compiling ends in a segmentation fault.
    """
    if nextitem is None or nextitem.path == item.path:
        return
    try:
        with open("/proc/self/maps", "rb") as file:
            n_maps = sum(1 for _ in file)
    except OSError:
        return
    if n_maps > 20_000:
        forget_programs()
        jax.clear_caches()
        gc.collect()
