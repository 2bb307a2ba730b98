"""Files of measured costs."""

import dataclasses
import json
import os

import jax
import numpy as np
import pytest

from specjax import drafters
from specjax.drafters import MeasuredFor, PassCosts

COSTS = PassCosts(draft=0.05, verify=(1.0, 1.3, np.float32(1.4), 2))
HERE = MeasuredFor(
    model="a/b", drafter="layer_skip:3", gamma=3, dtype="bfloat16", batch_size=2
)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "costs.json"
    drafters.save_costs(path, COSTS, HERE, plain_pass_s=0.0125, n_context=512)
    return path


def test_what_is_written_is_read(file):
    costs = drafters.load_costs(file, HERE)
    assert costs == PassCosts(0.05, (1.0, 1.3, float(np.float32(1.4)), 2.0))
    draft = drafters.adaptive(drafters.prompt_lookup(3), costs)
    assert draft.params["cost"].tolist() == pytest.approx([1.0, 1.5, 2.15])
    assert [path.name for path in file.parent.iterdir()] == ["costs.json"]


def test_the_file_says_what_its_numbers_are(file):
    content = json.loads(file.read_text())
    assert content["plain_pass_s"] == 0.0125
    assert content["c_plain_passes"] == 0.05
    assert content["v_plain_passes"][:2] == [1.0, 1.3]
    assert content["measured_for"] == {
        "model": "a/b",
        "drafter": "layer_skip:3",
        "gamma": 3,
        "dtype": "bfloat16",
        "batch_size": 2,
        "platform": jax.devices()[0].platform,
        "device": jax.devices()[0].device_kind,
    }
    assert content["measured_with"]["n_context"] == 512
    assert content["measured_with"]["jax"] == jax.__version__


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("model", "c", 'model was "a/b" and is "c"'),
        ("drafter", "layer_skip:4", 'drafter was "layer_skip:3" and is "layer_skip:4"'),
        ("gamma", 4, "gamma was 3 and is 4"),
        ("dtype", "float32", 'dtype was "bfloat16" and is "float32"'),
        ("batch_size", 1, "batch_size was 2 and is 1"),
        ("platform", "abacus", 'and is "abacus"'),
        ("device", "wooden", 'and is "wooden"'),
    ],
)
def test_costs_of_something_else_are_refused(file, name, value, message):
    other = dataclasses.replace(HERE, **{name: value})
    with pytest.raises(ValueError, match="holds costs of something else") as error:
        drafters.load_costs(file, other)
    said = str(error.value)
    assert message in said and str(file) in said and "not there yet" in said
    assert said.count(" and is ") == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "of format 2; this version reads 1"),
        ({"format": None}, "no key 'format'"),
        ({"measured_for": None}, "no key 'measured_for'"),
        ({"measured_for": 3}, "is no object"),
        ({"v_plain_passes": 3}, "v_plain_passes is no list"),
        ({"v_plain_passes": [1, 1.2]}, "has 2 values; .* 0 to 3 drafts"),
        ({"v_plain_passes": [1, 1.2, 1.3, "2"]}, "'2' is no cost"),
        ({"v_plain_passes": [1, 1.2, 1.3, float("nan")]}, "finite and above 0"),
        ({"c_plain_passes": -1}, "costs.draft=-1 must be finite and at least 0"),
        ({"c_plain_passes": True}, "True is no cost"),
    ],
)
def test_a_damaged_file_is_refused(file, change, message):
    content = {**json.loads(file.read_text()), **change}
    kept = {name: value for name, value in content.items() if value is not None}
    file.write_text(json.dumps(kept))
    with pytest.raises(ValueError, match=f"(?s){message}.* remove the file") as error:
        drafters.load_costs(file, HERE)
    assert str(file) in str(error.value)


def test_what_is_no_such_file_is_refused(file):
    for text in ("", "{", "[]", "3", "\x80"):
        file.write_text(text, "latin-1")
        with pytest.raises(ValueError, match="cannot be read as costs of passes"):
            drafters.load_costs(file, HERE)
    file.unlink()
    with pytest.raises(FileNotFoundError, match=r"no file of costs .*save_costs"):
        drafters.load_costs(file, HERE)


def test_a_write_that_fails_leaves_the_file_as_it_was(file, monkeypatch):
    before = file.read_bytes()
    bad = COSTS._replace(draft=float("nan"))
    with pytest.raises(ValueError, match="costs.draft=nan"):
        drafters.save_costs(file, bad, HERE, plain_pass_s=1.0, n_context=1)

    def crash(source, target):
        raise OSError("out of space")

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(OSError, match="out of space"):
        drafters.save_costs(file, COSTS, HERE, plain_pass_s=1.0, n_context=1)
    assert file.read_bytes() == before


def test_where_passes_have_one_width_they_cost_what_the_widest_does():
    costs = COSTS.at_one_width()
    assert costs == PassCosts(0.05, (2, 2, 2, 2))
    draft = drafters.adaptive(drafters.prompt_lookup(3), costs)
    assert draft.params["cost"].tolist() == pytest.approx([2.0, 2.1, 2.15])
