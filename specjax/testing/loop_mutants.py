"""Mistakes in the decode loop, planted by patching it while it is traced."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp

from specjax.decode import _step as step
from specjax.decode import forget_programs
from specjax.sampling import _controls as controls
from specjax.testing.loop_checks import CHECKS, make_model
from specjax.weights import Model

# Rows of the passes that the checks run.
_WIDTH = 4


class LoopMutant(NamedTuple):
    """A mistake planted in the loop.

    Attributes:
      name: short, unique.
      what: the mistake, in words.
      check: the check of ``loop_checks.CHECKS`` that is expected to find it.
      patches: (object, attribute, original -> wrong) to apply.
      model: what is done to the model, or None.
    """

    name: str
    what: str
    check: str
    patches: tuple[tuple[Any, str, Callable[[Any], Any]], ...] = ()
    model: Callable[[Model], Model] | None = None


def fault_of(mutant: LoopMutant | None, check: str) -> str | None:
    """Runs one check on the loop with a mistake planted.

    Args:
      mutant: the mistake, or None for the loop as it is.
      check: name of the check.

    Returns:
      What the check found, or None: the mutant survives it.
    """
    model = make_model()
    if mutant is not None and mutant.model is not None:
        model = mutant.model(model)
    with _planted(mutant):
        return CHECKS[check](model)


@contextlib.contextmanager
def _planted(mutant: LoopMutant | None) -> Iterator[None]:
    # Programs traced before, or while patched, must not be found again.
    forget_programs()
    try:
        with contextlib.ExitStack() as stack:
            for owner, name, wrong in mutant.patches if mutant else ():
                original = getattr(owner, name)
                stack.enter_context(mock.patch.object(owner, name, wrong(original)))
            yield
    finally:
        forget_programs()


def _target(**changes: Callable[[Any], Any]) -> Callable[[Model], Model]:
    """Changes functions of the model's target, each original -> wrong."""

    def change(model: Model) -> Model:
        wrong = {name: f(getattr(model.target, name)) for name, f in changes.items()}
        return dataclasses.replace(model, target=model.target._replace(**wrong))

    return change


def _patched(name: str, wrong: Callable[[Any], Any], owner: Any = step):
    return ((owner, name, wrong),)


def _logprobs(change: Callable[[jax.Array], jax.Array]) -> Callable[[Any], Any]:
    """Makes ``_fit`` change the array that drafts were drawn from."""

    def wrap(fit):
        def wrong(proposal, n):
            out = fit(proposal, n)
            if out.logprobs is None:
                return out
            return out._replace(logprobs=change(out.logprobs))

        return wrong

    return wrap


def _all_count(fit):
    """Counts every draft as valid."""

    def wrong(proposal, n):
        out = fit(proposal, n)
        return out._replace(n_valid=jnp.full_like(out.n_valid, n))

    return wrong


def _draw_with_test(noise):
    if not noise.accept.shape[1]:
        return noise
    return noise._replace(draw=noise.accept[:, 0])


def _last_stop_only(truncate):
    """Looks for stop ids at the last token of a pass alone."""

    def wrong(state, verdict, way, emitted, finite, possible):
        position = jnp.arange(emitted.shape[1])[None, :]
        last = position == verdict.n_accepted[:, None]
        hidden = jnp.where(last, emitted, -2)
        return truncate(state, verdict, way, hidden, finite, possible)

    return wrong


def _no_room(draft):
    """Forgets that the next token needs room before the limit."""

    def wrong(target_params, params, state, **static):
        loose = state.replace(limit=state.limit + 3)
        proposal, after = draft(target_params, params, loose, **static)
        return proposal, after.replace(limit=state.limit)

    return wrong


def _advance_all(advance):
    """Advances the controls by all that was drafted."""
    return lambda own, emitted, n: advance(
        own, emitted, jnp.where(n > 0, emitted.shape[1], 0)
    )


def _swapped_warp(warp):
    """Filters before the temperature."""

    def wrong(logits, settings):
        cold = settings._replace(temperature=jnp.ones_like(settings.temperature))
        hot = settings._replace(
            top_p=jnp.ones_like(settings.top_p), min_p=jnp.zeros_like(settings.min_p)
        )
        return warp(warp(logits, cold), hot)

    return wrong


def _emit_warped(emit):
    """Reports log-probabilities of the tempered law."""
    return lambda verdict, way, logits: emit(verdict, way, logits / 0.7)


def _emit_unchecked(emit):
    """Takes NaN logits for good ones."""

    def wrong(verdict, way, logits):
        emitted, logprobs, finite = emit(verdict, way, logits)
        return emitted, logprobs, jnp.ones_like(finite)

    return wrong


def _first_state(mask_states):
    """Gives every row of a pass the constraint of its first."""

    def wrong(mask, tokens, parents):
        states = mask_states(mask, tokens, parents)
        if tokens.shape[1] == _WIDTH:  # advancing, not applying
            return states
        return jnp.broadcast_to(states[:, :1], states.shape)

    return wrong


#: The mutants by name.
LOOPS: dict[str, LoopMutant] = {
    mutant.name: mutant
    for mutant in (
        LoopMutant(
            "uniforms_of_the_first_pass",
            "every pass of a row uses the same uniform numbers",
            "law of rejection",
            _patched(
                "uniform_noise", lambda f: lambda s, length, n: f(s, 0 * length, n)
            ),
        ),
        LoopMutant(
            "uniforms_shared_by_rows",
            "rows of a batch share their uniform numbers",
            "seeds",
            _patched("uniform_noise", lambda f: lambda s, at, n: f(0 * s, at, n)),
        ),
        LoopMutant(
            "accept_number_draws",
            "the number of the first test also draws the next token",
            "law of rejection",
            _patched(
                "uniform_noise",
                lambda f: lambda *a: _draw_with_test(f(*a)),
            ),
        ),
        LoopMutant(
            "noise_by_index",
            "Gumbel noise is keyed by the index in the pass, not the position",
            "identity",
            _patched(
                "gumbel_noise",
                lambda f: lambda s, at, v: f(s, at - at[:, :1], v),
            ),
        ),
        LoopMutant(
            "noise_by_pass",
            "Gumbel noise is keyed by where the pass starts",
            "identity",
            _patched(
                "gumbel_noise",
                lambda f: (
                    lambda s, at, v: f(s, jnp.broadcast_to(at[:, :1], at.shape), v)
                ),
            ),
        ),
        LoopMutant(
            "noise_shared_by_rows",
            "rows of a batch share their Gumbel noise",
            "seeds",
            _patched("gumbel_noise", lambda f: lambda s, at, v: f(0 * s, at, v)),
        ),
        LoopMutant(
            "cache_not_rolled_back",
            "the cache's length moves over rejected rows too",
            "identity",
            model=_target(
                commit=lambda f: lambda c, n: f(c, jnp.where(n > 0, _WIDTH, 0))
            ),
        ),
        LoopMutant(
            "cache_one_short",
            "the cache's length moves by one row too few",
            "identity",
            model=_target(commit=lambda f: lambda c, n: f(c, jnp.maximum(n - 1, 0))),
        ),
        LoopMutant(
            "stale_q",
            "draft probabilities are those of the position before",
            "law of rejection",
            _patched("_fit", _logprobs(lambda q: jnp.roll(q, 1, axis=1))),
        ),
        LoopMutant(
            "permuted_q",
            "draft probabilities are those of another row",
            "law of rejection",
            _patched("_fit", _logprobs(lambda q: jnp.roll(q, 1, axis=0))),
        ),
        LoopMutant(
            "rounded_q",
            "draft probabilities are of a flatter law than the drafts were drawn from",
            "law of block",
            _patched("_fit", _logprobs(lambda q: jax.nn.log_softmax(0.7 * q))),
        ),
        LoopMutant(
            "padding_counts",
            "drafts beyond n_valid are verified",
            "identity",
            _patched("_fit", _all_count),
        ),
        LoopMutant(
            "no_warp",
            "the verify path has no temperature and no filter",
            "law of rejection",
            _patched("warp", lambda f: lambda logits, settings: logits),
        ),
        LoopMutant(
            "swapped_warp",
            "the filters come before the temperature",
            "law of rejection",
            _patched("warp", _swapped_warp),
        ),
        LoopMutant(
            "stop_in_the_block",
            "a stop id among accepted drafts is overlooked",
            "identity",
            _patched("truncate", _last_stop_only),
        ),
        LoopMutant(
            "beyond_the_limit",
            "drafts may fill the row to its limit and the next token goes beyond",
            "identity",
            _patched("draft", _no_room),
        ),
        LoopMutant(
            "rejected_drafts_counted",
            "penalties and constraints advance over rejected drafts",
            "identity",
            _patched("advance_controls", _advance_all),
        ),
        LoopMutant(
            "controls_never_advance",
            "penalties and constraints see the prompt only",
            "identity",
            _patched("advance_controls", lambda f: lambda own, emitted, n: own),
        ),
        LoopMutant(
            "drafts_not_counted",
            "a row's penalties leave out the drafts before it",
            "identity",
            _patched("_drafted", lambda f: lambda *a: None, controls),
        ),
        LoopMutant(
            "settings_by_pass",
            "least lengths and forced tokens look at where the pass starts",
            "identity",
            _patched(
                "PassLayout", lambda f: lambda mask, at: f(mask, 0 * at), controls
            ),
        ),
        LoopMutant(
            "constraint_of_the_first_row",
            "every row of a pass is constrained as its first",
            "identity",
            _patched("_mask_states", _first_state, controls),
        ),
        LoopMutant(
            "warped_logprobs",
            "returned log-probabilities are of the tempered law",
            "identity",
            _patched("emit", _emit_warped),
        ),
        LoopMutant(
            "nan_goes_on",
            "NaN logits give a valid-looking token",
            "errors",
            _patched("emit", _emit_unchecked),
        ),
    )
}
