"""What a plan is asked for is checked before anything is measured."""

import math

import pytest

from specjax import bench
from specjax.bench import PlanSettings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(drafter="telepathy"), "telepathy.*prompt_lookup"),
        (dict(drafter="plain"), "'plain' proposes nothing"),
        (dict(gamma=0), "gamma=0 must be a whole number >= 1"),
        (dict(max_gamma=2), "max_gamma=2.*6"),
        (dict(hardware="abacus"), "'abacus'.*measured.*h200-sxm"),
        (dict(hardware="h200-sxm"), "acceptance must be given"),
        (
            dict(hardware="h200-sxm", acceptance={"x": 0.5}, verify_cost=2.0),
            "verify_cost=2.0 cannot be given",
        ),
        (dict(acceptance={"x": 1.5}), r"acceptance=1\.5 must be in \[0, 1\]"),
        (dict(acceptance={"x": (0.5, -1, 0, 0, 0, 0)}), r"acceptance\[1\]=-1"),
        (dict(acceptance={"x": (0.5, 0.5)}), "2 positions.*6 tokens"),
        (dict(acceptance={"x": math.nan}), "nan"),
        (dict(cost_ratio=-0.1), "cost_ratio=-0.1"),
        (dict(verify_cost=0.0), "verify_cost=0 must be"),
        (dict(verify_cost=(1.0, 1.2)), "2 entries.*need 7"),
        (dict(verify_cost=(2.0,) * 7), "entry 0"),
        (dict(dtype="float8"), "float8"),
        (dict(max_new_tokens=1), "max_new_tokens=1"),
        (dict(rounds=0), "rounds=0"),
        (dict(batches=(2, 4)), r"batches=\(2, 4\) must grow from 1"),
        (dict(prompts="/no/such.jsonl"), "/no/such.jsonl.*built-in"),
        (dict(output="/no/such/plan.png"), "/no/such/plan.png.*no directory"),
        (dict(output="/tmp"), "/tmp is a directory"),
        (dict(output="plan.bmp"), "plan.bmp must end in .png"),
        (dict(json="/no/such/plan.json"), "json=/no/such/plan.json"),
    ],
)
def test_settings_say_what_is_wrong_with_them(changes, message):
    with pytest.raises((ValueError, OSError), match=message):
        PlanSettings(**changes)


def test_settings_choose_how_far_to_look():
    given = dict(acceptance={"x": 0.5}, verify_cost=1.0, cost_ratio=0.0)
    assert PlanSettings().longest == 12
    assert PlanSettings(**given).longest == 32
    assert PlanSettings(**given | {"acceptance": {"x": (0.5,) * 9}}).longest == 9
    assert PlanSettings(**given | {"verify_cost": (1.0,) * 8}).longest == 7
    assert PlanSettings(max_gamma=7).longest == 7
    assert PlanSettings(acceptance={"x": 0.5}).longest == 12


def test_flags_are_read_as_they_are_written():
    assert bench.parse_acceptance([]) is None
    assert bench.parse_acceptance(["0.5"]) == {"given": 0.5}
    classes = bench.parse_acceptance(["a=0.5,0.25", "b=1"])
    assert classes == {"a": (0.5, 0.25), "b": 1.0}
    assert bench.parse_batches(["1", "8"]) == (1, 8)
    with pytest.raises(ValueError, match="'a' is given twice"):
        bench.parse_acceptance(["a=0.5", "a=0.6"])
    with pytest.raises(ValueError, match="verify_cost='much'"):
        bench.parse_numbers("verify_cost", "much")
    with pytest.raises(ValueError, match="whole"):
        bench.parse_batches(["x"])


def test_a_missing_matplotlib_is_said_first(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install matplotlib"):
        PlanSettings(output=str(tmp_path / "p.png"))
