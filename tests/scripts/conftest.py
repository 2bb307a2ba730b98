"""Runs a script of the repository in the test's own process."""

import importlib.util

import pytest
from absl import flags


@pytest.fixture(scope="module")
def script(request):
    """The test's ``SCRIPT`` as a module, and its flags, which go when it does."""
    before = set(flags.FLAGS)
    path = request.module.SCRIPT
    spec = importlib.util.spec_from_file_location(f"{path.stem}_script", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    names = set(flags.FLAGS) - before
    yield module, names
    for name in names:
        delattr(flags.FLAGS, name)


@pytest.fixture
def run_here(request, script, monkeypatch):
    """Runs the script with flags, without the user's compilation cache."""
    monkeypatch.setattr("specjax.enable_compilation_cache", lambda: None)
    module, names = script
    program = request.module.SCRIPT.name

    def run(*arguments):
        flags.FLAGS([program, *map(str, arguments)])
        module.main([program])

    yield run
    for name in names:
        flags.FLAGS[name].unparse()
