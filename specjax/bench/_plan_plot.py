"""The picture of a plan: speed-up over the draft length."""

from typing import TYPE_CHECKING, Any

from specjax.bench._plan import ClassPlan, SpeculationPlan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which the colour-blind can tell apart.
_COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
)
_DASHES = ("-", "--", "-.", ":")


def plot_plan(plan: SpeculationPlan, file: str, *, title: str) -> None:
    """Draws predicted speed-up over gamma, a curve a class, and what was measured.

    Args:
      plan: what to draw.
      file: where to write it; its ending is the format.
      title: above the plot.

    Raises:
      ValueError: matplotlib is not installed.
      OSError: the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(
            f"{file} needs matplotlib, which is not installed: `pip install "
            "matplotlib`, or leave the plot out."
        ) from error
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for i, one in enumerate(plan.classes):
        colour = _COLOURS[i % len(_COLOURS)]
        dash = _DASHES[i // len(_COLOURS) % len(_DASHES)]
        _draw_class(axes, one, colour, dash)
    _draw_frame(axes, plan)
    axes.set_title(title, fontsize=11)
    _legend(axes, plan)
    figure.savefig(file, dpi=150)


def _draw_class(axes: "Axes", one: ClassPlan, colour: str, dash: str) -> None:
    gammas = range(len(one.curve))
    axes.plot(gammas, one.curve, dash, color=colour, linewidth=2)
    best = one.best
    axes.plot(
        [best.gamma],
        [best.speedup],
        "o",
        color=colour,
        markersize=9,
        fillstyle="none",
        clip_on=False,  # gamma 0 is on the axis
    )
    for run in one.profile.runs:
        axes.plot(
            [run.gamma],
            [run.speedup],
            "D",
            color=colour,
            markeredgecolor="white",
            markersize=8,
            zorder=4,
        )


def _draw_frame(axes: "Axes", plan: SpeculationPlan) -> None:
    gamma = plan.settings.gamma
    axes.set_axisbelow(True)
    axes.axhline(1.0, color="0.35", linewidth=1.2, linestyle=(0, (4, 3)), zorder=1)
    axes.axvline(gamma, color="0.85", linewidth=6, zorder=0)
    axes.set_xlim(0, plan.max_gamma + 0.3)
    highest = max(max(one.curve) for one in plan.classes)
    runs = [run.speedup for one in plan.classes for run in one.profile.runs]
    axes.set_ylim(0, 1.08 * max([highest, 1.0, *runs]))
    step = max(1, -(-plan.max_gamma // 16))
    axes.set_xticks(range(0, plan.max_gamma + 1, step))
    axes.set_xlabel("gamma: draft tokens a pass")
    axes.set_ylabel("speed-up over plain decoding")
    axes.grid(True, color="0.92", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)


def _legend(axes: "Axes", plan: SpeculationPlan) -> None:
    """Explains curves by class, and marks once for all."""
    from matplotlib.lines import Line2D

    handles: list[Any] = []
    for i, one in enumerate(plan.classes):
        colour = _COLOURS[i % len(_COLOURS)]
        dash = _DASHES[i // len(_COLOURS) % len(_DASHES)]
        label = f"{one.profile.name}: predicted"
        handles.append(
            Line2D([], [], color=colour, linestyle=dash, linewidth=2, label=label)
        )
    add = lambda label, **how: handles.append(Line2D([], [], label=label, **how))
    mark: dict[str, Any] = dict(color="0.3", linestyle="none")
    add("best", marker="o", fillstyle="none", markersize=9, **mark)
    if any(one.profile.runs for one in plan.classes):
        add("measured", marker="D", markersize=7, **mark)
    add("plain decoding", color="0.35", linestyle="--", linewidth=1.2)
    add(f"gamma in use: {plan.settings.gamma}", color="0.85", linewidth=6)
    axes.legend(
        handles=handles, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5)
    )
