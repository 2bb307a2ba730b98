"""The Pallas kernels alone, compiled for TPUs and GPUs that are not here.

uv run --group aot pytest -m aot -n 1 tests/aot/test_aot_kernels.py
"""

import functools
import json
import os
import pathlib
import subprocess
import sys

import kernel_worker
import pytest

from specjax.testing.aot import TARGETS, environment

pytestmark = [pytest.mark.aot, pytest.mark.timeout(900)]

DEVICES = ("v5e:2x2", "v6e:2x2", "h200:1", "gb10:1")
MODULES = tuple(
    sorted(p.stem for p in pathlib.Path(__file__).parent.glob("*_cases.py"))
)
CASES = [
    (target, module, name)
    for module in MODULES
    for target in DEVICES
    for name in kernel_worker.case_names(module, TARGETS[target].platform)
]
MIB = 2**20


@functools.cache
def compiled(target, module):
    """Compiles all cases of a module for a target in one process."""
    worker = pathlib.Path(kernel_worker.__file__)
    env = {**os.environ, **environment(target)}
    command = [sys.executable, str(worker), target, module]
    out = subprocess.run(command, capture_output=True, text=True, env=env)
    lines = [json.loads(x) for x in out.stdout.splitlines() if x.startswith("{")]
    if out.returncode:
        pytest.fail(f"exit status {out.returncode}\n{out.stderr[-4000:]}")
    return {line["case"]: line for line in lines}


@pytest.mark.parametrize(("target", "module", "name"), CASES)
def test_compiles_and_copies_nothing(target, module, name, record_property):
    """One device; the kernel is in the program, and its largest input is not copied."""
    line = compiled(target, module)[name]
    if "error" in line:
        pytest.fail(line["error"])
    report = line["report"]
    record_property("kernel", json.dumps([target, module, name, report]))
    assert report["kernels"] >= 1
    assert report["copies"] == {}
    assert (
        report["argument_bytes"] + report["temp_bytes"] < TARGETS[target].memory_bytes
    )
