"""The drafter contract."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp

from specjax.models import Features, TargetSpec
from specjax.sampling import Settings
from specjax.trees import Topology
from specjax.typing import Array, Float, Int, Params

#: See ``DrafterSpec.draws``.
DrawKind = Literal["point", "sample", "without_replacement", "coupled"]


class TargetView(NamedTuple):
    """The target as a drafter that works on its cache sees it.

    Attributes:
      params: the target's parameters.
      cache: the target's cache before the pass; committed tokens but the pending one.
    """

    params: Params
    cache: Any


class Scored(NamedTuple):
    """What the target said in the last pass, of kept rows and of rejected ones.

    Attributes:
      tokens: of the pass: the pending one, then the drafts. [B, W]
      n_rows: how many of them count, [B] in [0, W]; 0 for rows that did not run.
      top: the target's most probable next tokens after each, most probable first;
        before controls and warp. [B, W, K]
    """

    tokens: Int[Array, "B W"]
    n_rows: Int[Array, " B"]
    top: Int[Array, "B W K"]


class DraftContext(NamedTuple):
    """What a drafter may look at. It grows by fields, never by keyword arguments.

    Attributes:
      history: prompt and committed tokens; junk beyond ``length``. [B, L] int32.
      length: committed tokens of each row, the pending one included. [B]
      settings: sampling settings of each row.
      features: hidden states of the last pass's rows, or None where there is none
        (before the first pass) or where the drafter asked for none.
      n_new: tokens the last pass committed. [B]
      budget: most drafts of each row that will be looked at, [B] in [0, gamma]; a
        drafter may spare itself the rest. None is gamma.
      target: the target, for drafters ``on_target``, while they propose.
      scored: what the last pass said, for drafters with ``n_top``, at ``commit``.
    """

    history: Int[Array, "B L"]
    length: Int[Array, " B"]
    settings: Settings
    features: Features | None
    n_new: Int[Array, " B"]
    budget: Int[Array, " B"] | None = None
    target: TargetView | None = None
    scored: Scored | None = None


class Proposal(NamedTuple):
    """Draft tokens of a pass.

    Attributes:
      tokens: [B, N] int32.
      logprobs: log-probabilities (natural log, float32) of the law each token was
        drawn from, the very array it was drawn from, [B, N, V]; None when every
        token is a point mass (an argmax, a retrieved token).
      n_valid: how many of a row's tokens are proposed, [B] in [0, N]; 0 is plain
        decoding for that row.
      confidence: estimated acceptance of each token, [B, N] in [0, 1], or None.
      parents: of a tree, the token that each token follows, -1 for children of the
        pending token; parents come first, so that any first ``n_valid`` are a tree as
        well. Then ``logprobs[:, r]`` is the law that the children of row r of the pass
        (0: the pending token, j + 1: token j) were drawn from. None for a chain, for
        which this is the law of token r.
      cache: the target's cache, of a drafter that wrote to it behind the committed
        text (where the pass writes over it), else None.
      hidden: of a drafter with an ``exit_block``: the residual stream before that
        block, of the pending token and of each draft, [B, N+1, D].
    """

    tokens: Int[Array, "B N"]
    logprobs: Float[Array, "B N V"] | None
    n_valid: Int[Array, " B"]
    confidence: Float[Array, "B N"] | None = None
    parents: Int[Array, "B N"] | None = None
    cache: Any = None
    hidden: Float[Array, "B N1 D"] | None = None


@dataclasses.dataclass(frozen=True)
class DrafterSpec:
    """Static facts of a drafter.

    Attributes:
      name: as in the registry.
      gamma: draft tokens a pass, at most.
      needs_features: whether the context carries the target's hidden states.
      draws: where tokens come from. ``point``: point masses. ``sample``: the law in
        ``Proposal.logprobs``, with noise that no rule uses; siblings independently of
        each other. ``without_replacement``: so, but siblings one after the other from
        what is left of it, in the order of the nodes. ``coupled``: the Gumbel
        noise of the target's own draws (point masses to the rule), which is exact
        only where a draft is kept for being the token that the target draws.
      on_target: of drafters that work on the target's own cache, which they get as
        ``DraftContext.target`` and give back as ``Proposal.cache``: the shape of a
        token in it (``TargetSpec.cache_shape``). Empty: they do not.
      exit_block: blocks of the target that such a drafter runs as a pass would;
        verification goes on from there (``Proposal.hidden``). 0: none.
      n_top: most probable tokens of each row of a pass that the drafter learns from
        (``DraftContext.scored``).
      depth: of drafters of trees, the most tokens of a pass that can be kept; gamma is
        then how many nodes a tree may have. 0: it drafts chains.
      topology: the tree, where it is the same in every pass; else its shape may depend
        on the drafts, which not every rule allows (``verify.check_trees``).
      bank: draft lengths below gamma that deserve a pass of their own width.
    """

    name: str
    gamma: int
    needs_features: bool = False
    draws: DrawKind = "point"
    on_target: tuple[int, ...] = ()
    exit_block: int = 0
    n_top: int = 0
    depth: int = 0
    topology: Topology | None = None
    bank: tuple[int, ...] = ()

    @property
    def n_levels(self) -> int:
        """Most tokens of a pass that can be kept."""
        return self.depth or self.gamma


class Drafter(NamedTuple):
    """A drafter: pure functions, parameters and state explicit.

    The state is a pytree whose structure, shapes and dtypes never change.

    Attributes:
      spec: static facts.
      init: (batch, capacity) -> state, for empty rows.
      prefill: (params, state, row, tokens [1, T], n_real, features) -> state; a
        row's prompt chunk went through the target: T tokens of which the first
        n_real count. A chunk that starts a new sequence in the row is preceded by
        ``reset_row``.
      reset_row: (state, row) -> state; forgets a row.
      propose: (params, state, context) -> (Proposal, state).
      commit: (params, state, context) -> state; the context is the one after the
        pass.
      copy_row: (state, source, row, length) -> state; the row becomes what prefill of
        the source's first ``length`` tokens would have made it, whatever the source
        has seen since; 0 forgets the row. None where the state does not hold that any
        more.
      coupled: () -> the same drafter with ``spec.draws`` "coupled", or None where there
        is none: it draws nothing.
    """

    spec: DrafterSpec
    init: Callable[[int, int], Any]
    prefill: Callable[..., Any]
    reset_row: Callable[..., Any]
    propose: Callable[..., tuple[Proposal, Any]]
    commit: Callable[..., Any]
    copy_row: Callable[..., Any] | None = None
    coupled: "Callable[[], Drafter] | None" = None


def inherited(*inner: Drafter) -> dict[str, Any]:
    """Returns what a drafter made of others must say of itself, as they do.

    Args:
      *inner: the drafters that it asks.

    Returns:
      Fields of ``DrafterSpec``.

    Raises:
      ValueError: they work on caches of different shapes.
    """
    specs = [it.spec for it in inner]
    trees = [spec.depth for spec in specs]
    shapes = {spec.on_target for spec in specs if spec.on_target}
    if len(shapes) > 1:
        raise ValueError(
            f"{' and '.join(spec.name for spec in specs)} are made for different "
            "targets; make them for one."
        )
    return {
        "needs_features": any(spec.needs_features for spec in specs),
        "on_target": next(iter(shapes), ()),
        "exit_block": max(spec.exit_block for spec in specs),
        "n_top": max(spec.n_top for spec in specs),
        "depth": max(spec.n_levels for spec in specs) if any(trees) else 0,
        "topology": specs[0].topology if len(specs) == 1 else None,
    }


class BoundDrafter(NamedTuple):
    """A drafter and the parameters that go with it.

    Attributes:
      drafter: the drafter.
      params: its parameters, None where it has none.
    """

    drafter: Drafter
    params: Params | None


def unbind[T](
    drafter: T | BoundDrafter, params: Params | None
) -> tuple[T | Drafter, Params | None]:
    """Takes a drafter and its parameters apart; what is not bound stays as it is.

    Raises:
      ValueError: parameters are given beside a drafter that brings its own.
    """
    if not isinstance(drafter, BoundDrafter):
        return drafter, params
    if params is not None:
        raise ValueError(
            f"drafter {drafter.drafter.spec.name!r} brings its own parameters; leave "
            "draft_params out."
        )
    return drafter


def match_noise(drafter: Drafter, noise: str) -> Drafter:
    """Makes a drafter draw as a rule's noise allows and likes best.

    Args:
      drafter: any drafter.
      noise: of the rule: ``gumbel`` rules keep a draft for being the target's own
        draw, which one made with the same noise mostly is.

    Returns:
      The drafter, coupled where the rule is and it can be.

    Raises:
      ValueError: a coupled drafter meets a rule that needs independent drafts.
    """
    if noise == "gumbel":
        return drafter if drafter.coupled is None else drafter.coupled()
    if drafter.spec.draws == "coupled" and noise == "uniform":
        raise ValueError(
            f"drafter {drafter.spec.name!r} draws with the target's own noise, which "
            "is exact under the rule 'coupled' only; use its draws='sample' form."
        )
    return drafter


def check_target(drafter: Drafter, spec: TargetSpec, *, halves: bool) -> None:
    """Checks that a drafter which works on its target's cache is made for this one.

    Args:
      drafter: any drafter.
      spec: of the target.
      halves: whether the target's forward can be cut.

    Raises:
      ValueError: it is made for another.
    """
    own = drafter.spec
    if own.on_target and (spec.cache_kind != "kv" or own.on_target != spec.cache_shape):
        raise ValueError(
            f"drafter {own.name!r} is made for a target with a cache of shape "
            f"{own.on_target} a token and works on no other; this target's is "
            f"{spec.cache_shape} ({spec.cache_kind}). Make the drafter of this target."
        )
    if own.exit_block and not halves:
        raise ValueError(
            f"drafter {own.name!r} leaves the target after {own.exit_block} blocks, "
            "and this target cannot be cut: use one without taps and skipped layers."
        )


def n_wanted(context: DraftContext, gamma: int) -> Int[Array, " B"]:
    """Returns how many drafts of each row are worth making, in [0, gamma]."""
    batch = context.length.shape[0]
    budget = gamma if context.budget is None else jnp.minimum(context.budget, gamma)
    return jnp.broadcast_to(jnp.asarray(budget, jnp.int32), (batch,))


def pending_token(context: DraftContext) -> Int[Array, "B 1"]:
    """Returns each row's last committed token, 0 for rows without text."""
    at = jnp.clip(context.length - 1, 0, context.history.shape[1] - 1)[:, None]
    token = jnp.take_along_axis(context.history, at, axis=1)
    return jnp.where(context.length[:, None] > 0, token, 0)


def stateless(
    spec: DrafterSpec,
    propose: Callable[[Any, DraftContext], Proposal],
    *,
    coupled: Callable[[], Drafter] | None = None,
) -> Drafter:
    """Makes a drafter that looks at nothing but its parameters and the context.

    Args:
      spec: static facts.
      propose: (params, context) -> proposal.
      coupled: see ``Drafter``.

    Returns:
      A drafter with the empty state.
    """
    return Drafter(
        spec=spec,
        init=lambda batch, capacity: (),
        prefill=lambda params, state, row, tokens, n_real, features: state,
        reset_row=lambda state, row: state,
        propose=lambda params, state, context: (propose(params, context), state),
        commit=lambda params, state, context: state,
        copy_row=lambda state, source, row, length: state,
        coupled=coupled,
    )


def n_kept(
    context: DraftContext,
    drafted: Int[Array, "B G"],
    base: Int[Array, " B"],
    end: Int[Array, " B"],
) -> Int[Array, " B"]:
    """Counts the leading drafts of a pass that stand in the committed text.

    Args:
      context: the one after the pass.
      drafted: drafts of the pass.
      base: tokens that were committed when they were made.
      end: where in the text a draft no longer counts.

    Returns:
      Drafts of each row that are the text's tokens from ``base`` on, before ``end``.
    """
    at = base[:, None] + jnp.arange(drafted.shape[1])[None, :]
    size = context.history.shape[1]
    text = jnp.take_along_axis(context.history, jnp.minimum(at, size - 1), axis=1)
    same = (text == drafted) & (at < end[:, None])
    return jnp.sum(jnp.cumprod(same.astype(jnp.int32), axis=1), axis=1)


def check_gamma(gamma: int, *, least: int = 1) -> None:
    """Checks a draft length.

    Raises:
      ValueError: it is no whole number of at least ``least``.
    """
    if isinstance(gamma, bool) or not isinstance(gamma, int) or gamma < least:
        raise ValueError(
            f"gamma={gamma!r} must be a whole number >= {least}: draft tokens a pass."
        )
