"""Public names exist and are documented."""

import importlib
import inspect
import pkgutil

import pytest

import specjax


def _packages():
    names = ["specjax"]
    for info in pkgutil.walk_packages(specjax.__path__, "specjax."):
        if not info.name.rpartition(".")[2].startswith("_"):
            names.append(info.name)
    return names


PACKAGES = _packages()


@pytest.mark.parametrize("name", PACKAGES)
def test_every_module_has_a_docstring_and_its_names(name):
    module = importlib.import_module(name)
    assert (module.__doc__ or "").strip(), f"{name} has no docstring"
    names = getattr(module, "__all__", [])
    assert len(names) == len(set(names)), f"{name}.__all__ repeats a name"
    missing = [n for n in names if not hasattr(module, n)]
    assert not missing, f"{name}.__all__ names what is not there"


def _documented(thing):
    doc = inspect.getdoc(thing) or ""
    # NamedTuples and dataclasses make one of their own: the signature.
    return doc.strip() and not doc.startswith(f"{getattr(thing, '__name__', '?')}(")


@pytest.mark.parametrize("name", PACKAGES)
def test_every_public_function_and_class_is_documented(name):
    module = importlib.import_module(name)
    bare = []
    for public in getattr(module, "__all__", []):
        thing = getattr(module, public)
        if inspect.ismodule(thing) or not (
            inspect.isclass(thing) or inspect.isroutine(thing)
        ):
            continue
        if not _documented(thing):
            bare.append(public)
        if inspect.isclass(thing) and thing.__module__.startswith("specjax"):
            bare += [
                f"{public}.{attribute}"
                for attribute, value in vars(thing).items()
                if not attribute.startswith("_")
                and (inspect.isfunction(value) or isinstance(value, property))
                and not inspect.getdoc(value)
            ]
    assert not bare, f"{name}: {bare} have no docstring"


def test_the_front_page():
    """A notebook needs nothing but ``import specjax``."""
    for name in ("load", "generate", "stream", "Engine", "Request", "Settings", "warp"):
        assert name in specjax.__all__
    assert sorted(specjax.__all__, key=str.lower) == sorted(
        set(specjax.__all__), key=str.lower
    )
    assert specjax.__version__.count(".") == 2


def test_signatures_are_annotated():
    """Every argument of a public function has a type."""
    bare = []
    for name in specjax.__all__:
        thing = getattr(specjax, name)
        if inspect.isfunction(thing):
            for argument in inspect.signature(thing).parameters.values():
                if argument.annotation is inspect.Parameter.empty:
                    bare.append(f"{name}({argument.name})")
    assert not bare
