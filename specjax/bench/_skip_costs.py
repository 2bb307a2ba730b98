"""What a draft with sublayers left out costs: linear in the sublayers."""

import dataclasses
from typing import TYPE_CHECKING, Literal

import jax

from specjax import drafters, theory
from specjax.bench._micro import Case, bare_pass, interleave
from specjax.bench._plan_measure import measure_costs, pass_capacity
from specjax.bench._plan_settings import Numbers
from specjax.bench._speed import median_ratio
from specjax.models import LayerSkip, decoder_target
from specjax.typing import Params

if TYPE_CHECKING:
    from specjax.weights import Model

CostSource = Literal["measured", "bytes"]

_PASSES = 12


@dataclasses.dataclass(frozen=True)
class SkipCosts:
    """What passes cost, in one-row passes of the target.

    Attributes:
      attention: the part of a one-row pass that each block's attention takes.
      ff: the part that each block's feed-forward network takes.
      verify_cost: v, one number for any drafts at all, or by their number from 0 on.

    Raises:
      ValueError: a sublayer takes no time, or all together take more than a pass.
    """

    attention: tuple[float, ...]
    ff: tuple[float, ...]
    verify_cost: Numbers

    def __post_init__(self) -> None:
        """Checks the sublayers; the theory checks v."""
        total = sum(self.attention) + sum(self.ff)
        if not min(*self.attention, *self.ff) > 0 or not total < 1:
            raise ValueError(
                f"A block's attention takes {self.attention[0]:.4f} of a pass, its "
                f"feed-forward network {self.ff[0]:.4f}, all {len(self.ff)} blocks "
                f"{total:.3f}; parts must be above 0 and together below 1. Where they "
                "were measured the machine was too busy: raise rounds, or take costs "
                "by bytes."
            )

    def ratio(self, skip: LayerSkip) -> float:
        """Returns c, the cost of a draft step without some sublayers."""
        saved = sum(self.attention[i] for i in skip.attention)
        return 1 - saved - sum(self.ff[i] for i in skip.ff)

    @property
    def least(self) -> float:
        """The cost of what no subset leaves out: the embedding, the norm, the head."""
        return 1 - sum(self.attention) - sum(self.ff)

    def curve(self, acceptance: float, cost: float, max_gamma: int) -> list[float]:
        """Returns the speed-ups of 1 to max_gamma drafts."""
        both = acceptance, cost
        curve = theory.speedup_curve(*both, self.verify_cost, max_gamma=max_gamma)
        return [float(speedup) for speedup in curve[1:]]


def cost_by_bytes(params: Params, n_layers: int) -> tuple[list[float], list[float]]:
    """Counts which part of the bytes that a one-row pass reads each sublayer has.

    Args:
      params: of the decoder.
      n_layers: its blocks.

    Returns:
      Parts of attention and of feed-forward networks by block, norms included.
    """
    size = lambda *trees: sum(x.nbytes for x in jax.tree.leaves(trees))
    # A head of its own is read instead of the embedding, of which a pass reads a row.
    unread = size(params["embedding"]) if "head" in params else 0
    whole = size(params) - unread
    blocks = [params["blocks"][str(i)] for i in range(n_layers)]
    attention = [size(b["attention"], b["attention_norm"]) / whole for b in blocks]
    return attention, [size(b["ff"], b["ff_norm"]) / whole for b in blocks]


def measure_sublayers(
    model: "Model", *, n_context: int, capacity: int, rounds: int
) -> tuple[list[float], list[float]]:
    """Times one-row passes: the whole, without half of the attention, of the networks.

    Args:
      model: the target, of two blocks at least.
      n_context: tokens in the cache.
      capacity: of the cache.
      rounds: passes of each kind are timed in turn this many times.

    Returns:
      The part of a pass that attention and feed-forward network of a block take, the
      same for all blocks.
    """
    half = tuple(range(1, model.config.n_layers, 2))

    def case(name: str, skip: LayerSkip) -> Case:
        form = decoder_target(model.config, skip=skip)
        short = dataclasses.replace(model, target=form)
        timed = bare_pass(short, width=1, capacity=capacity, length=n_context)
        return dataclasses.replace(timed, name=name)

    cases = [
        case("whole", LayerSkip()),
        case("attention", LayerSkip(attention=half)),
        case("ff", LayerSkip(ff=half)),
    ]
    seconds = interleave(cases, n=_PASSES, rounds=rounds)
    part = lambda name: (1 - median_ratio(seconds[name], seconds["whole"])) / len(half)
    n = model.config.n_layers
    return [part("attention")] * n, [part("ff")] * n


def skip_costs(
    model: "Model",
    source: CostSource,
    *,
    verify_cost: Numbers | None,
    max_gamma: int,
    n_context: int,
    rounds: int,
) -> SkipCosts:
    """Measures or counts what drafts and their verification cost.

    Args:
      model: the target.
      source: of the sublayers' parts: ``measured`` one-row passes, or ``bytes``.
      verify_cost: v where it is known; None measures it.
      max_gamma: the longest draft to consider.
      n_context: tokens in the cache of timed passes.
      rounds: repetitions of what is timed.

    Returns:
      The costs.

    Raises:
      ValueError: the passes do not fit the model's context, or were timed so badly
        that a sublayer takes no time.
    """
    capacity = pass_capacity(model, n_context, max_gamma)
    if source == "bytes":
        attention, ff = cost_by_bytes(model.params, model.config.n_layers)
    else:
        attention, ff = measure_sublayers(
            model, n_context=n_context, capacity=capacity, rounds=rounds
        )
    if verify_cost is None:
        verify_cost = measure_costs(
            model,
            drafters.plain(),
            max_gamma=max_gamma,
            n_context=n_context,
            rounds=rounds,
            cost_ratio=0.0,  # of a draft: it is the parts that tell
        ).verify_cost
    return SkipCosts(tuple(attention), tuple(ff), verify_cost)
