"""A plan is printed, kept and drawn."""

import json
import sys

import numpy as np
import pytest
from rich.console import Console

from specjax import bench
from specjax.bench import Costs, PlanSettings, Profile, Run

A = (0.8, 0.6, 0.5, 0.25)


def _plan():
    settings = PlanSettings(acceptance={"a": 0.5, "b": A * 2})
    costs = Costs(0.05, 1.2, by_batch={1: 1.2, 4: 1.3})
    run = Run(6, 1.25, 2.5, 0.5, (3, 1), (4, 3))
    profiles = (Profile("a", 0.5), Profile("b", A, 0.25, (run,)))
    plans = [bench.plan_class(p, costs, gamma=6, max_gamma=8) for p in profiles]
    return bench.SpeculationPlan(settings, 8, costs, tuple(plans))


def test_a_plan_is_shown_and_kept_as_json():
    plan = _plan()
    console = Console(width=100)
    with console.capture() as capture:
        console.print(bench.render_plan(plan))
    shown = capture.get()
    assert max(map(len, shown.splitlines())) <= 100
    for one in plan.classes:
        assert f"{one.predicted:.3f}" in shown and f"{one.best.speedup:.3f}" in shown
    assert "1.250" in shown and f"{plan.classes[1].efficiency[0]:.3f}" in shown
    record = json.loads(json.dumps(plan.as_dict()))
    assert record["classes"][1]["best"] == plan.classes[1].best._asdict()
    assert record["classes"][1]["profile"]["runs"][0]["reached_at"] == [4, 3]
    assert record["settings"]["gamma"] == 6 and record["costs"]["cost_ratio"] == 0.05


def test_the_plot_has_a_curve_a_class_and_the_measured_point(tmp_path, monkeypatch):
    figure = pytest.importorskip("matplotlib.figure")
    from matplotlib.image import imread

    made = []
    keep = figure.Figure.savefig
    monkeypatch.setattr(
        figure.Figure,
        "savefig",
        lambda self, *a, **k: made.append(self) or keep(self, *a, **k),
    )
    plan, file = _plan(), tmp_path / "plan.png"
    bench.plot_plan(plan, str(file), title="what gains")
    image = imread(file)
    assert image.shape[0] > 400 and image.shape[1] > 600
    assert len(np.unique(image.reshape(-1, image.shape[2]), axis=0)) > 20
    (axes,) = made[0].axes
    assert axes.get_title() == "what gains"
    assert "gamma" in axes.get_xlabel() and "speed-up" in axes.get_ylabel()
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert {"a: predicted", "b: predicted", "measured"} <= set(labels)
    lines = [np.column_stack(line.get_data()) for line in axes.get_lines()]
    for one in plan.classes:
        curve = np.column_stack([range(9), one.curve])
        assert any(np.array_equal(line, curve) for line in lines)
    assert any(np.array_equal(line, [[6, 1.25]]) for line in lines)


def test_a_missing_matplotlib_is_said(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match="pip install matplotlib"):
        bench.plot_plan(_plan(), str(tmp_path / "p.png"), title="")
