"""Cases of ``verify_sample`` and a float64 account of each, and that these are right.

A decision is a path of comparisons: what a filter keeps, whether a draft passes, which
token is drawn. ``account`` goes along the path in float64 and finds by how much the
closest comparison was decided. Two float32 implementations may differ where that is
within rounding, and nowhere else; ``compare`` asserts so and counts.
"""

import collections
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.ops.verify_sample import verify_sample_reference
from specjax.sampling import Settings, UniformNoise, gumbel_noise

RULES = ("greedy", "coupled", "rejection")
#: Comparisons closer than this are near-ties: of probabilities absolutely, of scores in
#: natural log units. A sum of V float32 numbers of total 1 is off by some 1e-6.
NEAR = 1e-5


class Drafts(NamedTuple):
    tokens: Any
    logprobs: Any
    n_valid: Any
    parents: Any = None


@dataclasses.dataclass(frozen=True)
class Case:
    """Arguments of one call, NumPy arrays."""

    rule: str
    logits: Any
    drafts: Drafts
    settings: Any
    noise: Any

    def replace(self, **changes):
        return dataclasses.replace(self, **changes)

    @functools.cached_property
    def accounts(self):
        return [account(self, b) for b in range(self.logits.shape[0])]


def log_softmax(x):
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def make_case(
    rule,
    *,
    batch=6,
    n_drafts=3,
    vocab=1000,
    law=True,
    kind="random",
    dtype="float32",
    seed=0,
    **settings,
):
    """Draws a case; ``settings`` are given to all rows, the others drawn."""
    rng = np.random.default_rng(seed)
    width = n_drafts + 1
    logits = (
        rng.normal(size=(batch, width, vocab))
        * rng.choice([0.5, 2, 6], batch)[:, None, None]
    )
    if kind == "ties":
        logits = np.round(logits)
    elif kind == "equal":
        logits = np.zeros_like(logits)
    elif kind == "banned":
        logits[rng.random(logits.shape) < 0.9] = -np.inf
        logits[..., rng.integers(vocab)] = 1.0
    elif kind == "peaked":
        logits[..., rng.integers(vocab)] += 30.0
    logits = np.asarray(jnp.asarray(logits, dtype))
    # The draft's law is near the target's, so that much is accepted.
    near = logits[:, :n_drafts].astype(np.float64)
    near = np.where(np.isfinite(near), near + rng.normal(size=near.shape) * 0.7, near)
    logprobs = log_softmax(near).astype(np.float32)
    perturbed = logprobs + rng.gumbel(size=logprobs.shape)
    tokens = np.argmax(perturbed, -1).astype(np.int32)
    if rule != "rejection" or not law:
        argmax = np.argmax(logits[:, :n_drafts].astype(np.float64), -1)
        tokens = np.where(rng.random(tokens.shape) < 0.6, argmax, tokens)
    pick = lambda name, values, dtype: np.asarray(
        [settings[name]] * batch if name in settings else rng.choice(values, batch),
        dtype,
    )
    chosen = Settings(
        temperature=pick("temperature", [0.0, 0.6, 1.0, 1.7], np.float32),
        top_k=pick("top_k", [0, 0, 1, 5, 50, vocab], np.int32),
        top_p=pick("top_p", [1.0, 1.0, 0.9, 0.5, 1e-6], np.float32),
        min_p=pick("min_p", [0.0, 0.0, 0.05], np.float32),
        seed=rng.integers(0, 2**32, batch, dtype=np.uint32),
    )
    noise = None
    if rule == "coupled":
        position = np.arange(width)[None] + rng.integers(0, 99, (batch, 1))
        noise = np.asarray(gumbel_noise(chosen.seed, jnp.asarray(position), vocab))
    elif rule == "rejection":
        accept = rng.random((batch, n_drafts), np.float32)
        accept[rng.random(accept.shape) < 0.1] = 0.0
        noise = UniformNoise(accept, rng.random(batch, np.float32))
    n_valid = rng.integers(0, n_drafts + 1, batch, dtype=np.int32)
    n_valid[: batch // 2] = n_drafts
    drafts = Drafts(tokens.astype(np.int32), logprobs if law else None, n_valid)
    return Case(rule, logits, drafts, chosen, noise)


class Account(NamedTuple):
    """What float64 says of a row, and by how much at the closest comparison."""

    n_accepted: int
    next_token: int
    margin: float


def account(case, b):
    """Goes along a row's path in float64; exact where the float32 scores decide."""
    margin = np.inf
    n_valid = int(case.drafts.n_valid[b])
    for i in range(n_valid + 1):
        scores, closest = _warp(case, b, i)
        margin = min(margin, closest)
        token = int(case.drafts.tokens[b, i]) if i < n_valid else -1
        if case.rule == "rejection":
            passed, closest = _ratio_test(case, b, i, scores, token)
            drawn = None
        else:
            drawn, closest = _choose(case, b, i, scores)
            passed = drawn == token
        margin = min(margin, closest)
        if passed and i < n_valid:
            continue
        if drawn is None:
            drawn, closest = _residual_draw(case, b, i, scores, token)
            margin = min(margin, closest)
        return Account(i, int(drawn), margin)
    raise AssertionError


def _warp(case, b, i):
    """Gives a row's float32 scores after the filters, and the closest comparison."""
    logits = case.logits[b, i].astype(np.float32)
    at = lambda name: getattr(case.settings, name)[b]
    if case.rule == "greedy":
        return logits, np.inf
    if at("temperature") == 0:
        return np.where(np.arange(logits.size) == logits.argmax(), 0.0, -np.inf), np.inf
    scores = (logits / at("temperature")).astype(np.float32)
    order = np.argsort(-scores, kind="stable")
    margin = np.inf
    keep = np.ones(scores.size, bool)
    if 0 < at("top_k") < scores.size:
        keep[order[at("top_k") :]] = False
    exact = scores.astype(np.float64)
    weights = np.where(keep, np.exp(exact - exact.max()), 0.0)
    if at("top_p") < 1:
        sums = np.cumsum(weights[order]) / weights.sum()
        last = int(np.argmax(sums >= np.float64(at("top_p"))))
        before = sums[last - 1] if last else -np.inf
        margin = min(abs(sums[last] - at("top_p")), abs(before - at("top_p")))
        keep[order[last + 1 :]] = False
    if at("min_p") > 0:
        floor = exact.max() + np.log(np.float64(at("min_p")))
        margin = min(margin, np.abs(exact - floor).min())
        keep &= exact >= floor
    return np.where(keep, scores, -np.inf), margin


def _choose(case, b, i, scores):
    """Gives the argmax, with noise where the rule has it, and by how much it won."""
    scores = scores.astype(np.float64)
    if case.rule == "greedy":
        return np.argmax(scores), np.inf
    noise = case.noise[b, i].astype(np.float64)
    n_columns = -(-scores.size // 256)
    table = np.full(256 * n_columns, -np.inf)
    table[: scores.size] = scores
    table = table.reshape(256, n_columns)
    # Cold scores reach 1e5: their exp needs the largest taken off first.
    top = scores.max()
    with np.errstate(divide="ignore"):
        columns = np.log(np.exp(table - top).sum(0)) + top + noise[:n_columns]
    column = int(columns.argmax())
    lanes = table[:, column] + noise[n_columns:]
    margin = min(_lead(columns), _lead(lanes))
    return int(lanes.argmax()) * n_columns + column, margin


def _lead(x):
    """Gives by how much the largest is ahead of the next."""
    second, first = np.sort(x)[-2:]
    return first - second if np.isfinite(second) else np.inf


def _law(scores):
    p = np.exp(scores.astype(np.float64) - scores.max())
    return p / p.sum()


def _ratio_test(case, b, i, scores, token):
    if token < 0:
        return False, np.inf
    p, q = _law(scores)[token], 1.0
    if case.drafts.logprobs is not None:
        q = np.exp(np.float64(case.drafts.logprobs[b, i, token]))
    u = np.float64(case.noise.accept[b, i])
    if p == 0 or u == 0:
        return bool(u * q < p), np.inf
    return bool(u * q < p), abs(u * q - p) / max(u * q, p)


def _residual_draw(case, b, i, scores, token):
    p = _law(scores)
    if token >= 0:
        q = np.arange(p.size) == token
        if case.drafts.logprobs is not None:
            q = np.exp(case.drafts.logprobs[b, i].astype(np.float64))
        left = np.maximum(p - q, 0.0)
        p = left if left.sum() > 1e-9 else p
    sums = np.cumsum(p)
    goal = np.float64(case.noise.draw[b]) * sums[-1]
    drawn = int(np.argmax(sums > goal))
    if np.count_nonzero(p) == 1:
        return drawn, np.inf
    before = goal - (sums[drawn - 1] if drawn else -np.inf)
    return drawn, min(sums[drawn] - goal, before) if drawn else sums[drawn] - goal


class Tally(collections.Counter):
    """Decisions, near-ties among them, and decisions that differ."""


def compare(case, found, wanted=None):
    """Asserts that two decisions agree but for near-ties, and counts.

    Args:
      case: what was decided.
      found: the decision under test.
      wanted: another float32 one; None: float64's alone is looked at.

    Returns:
      A tally.
    """
    tally = Tally()
    for b, exact in enumerate(case.accounts):
        mine = (int(found.n_accepted[b]), int(found.next_token[b]))
        others = [(exact.n_accepted, exact.next_token)]
        if wanted is not None:
            others.append((int(wanted.n_accepted[b]), int(wanted.next_token[b])))
        tally["rows"] += 1
        tally["near"] += exact.margin < NEAR
        if any(mine != other for other in others):
            assert exact.margin < NEAR, (b, mine, others, exact)
            tally["differ"] += 1
    return tally


@functools.partial(jax.jit, static_argnames="rule")
def reference(logits, drafts, settings, noise, *, rule):
    return verify_sample_reference(logits, drafts, settings, noise, rule=rule)


def by_reference(case):
    given = (case.logits, case.drafts, case.settings, case.noise)
    return reference(*given, rule=case.rule)


KINDS = ("random", "ties", "equal", "banned", "peaked")


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("vocab", [300, 1000])
def test_float64_and_the_reference_agree_but_for_near_ties(rule, vocab):
    tally = Tally()
    for seed, kind in enumerate(KINDS):
        case = make_case(rule, vocab=vocab, kind=kind, seed=seed)
        tally += compare(case, by_reference(case))
        if rule == "rejection":
            case = make_case(rule, vocab=vocab, kind=kind, seed=seed, law=False)
            tally += compare(case, by_reference(case))
    assert tally["differ"] <= 0.05 * tally["rows"]
    assert tally["near"] <= 0.25 * tally["rows"]


def wrong(case):
    """Gives cases that are not the one given: a comparison must tell them apart."""
    roll = lambda x: np.roll(x, 1, axis=0)
    # A setting that no row has stays out of it.
    without = lambda name, value: case.settings._replace(
        **{name: np.full_like(getattr(case.settings, name), value)}
    )
    yield "rows", case.replace(logits=roll(case.logits))
    yield "order", case.replace(logits=case.logits[..., ::-1])
    drafts = case.drafts
    yield "n_valid", case.replace(drafts=drafts._replace(n_valid=0 * drafts.n_valid))
    if case.rule == "greedy":
        return
    yield "temperature", case.replace(settings=without("temperature", 3.0))
    yield "top_k", case.replace(settings=without("top_k", 0))
    yield "top_p", case.replace(settings=without("top_p", 1.0))
    yield "noise", case.replace(noise=jax.tree.map(roll, case.noise))
    if drafts.logprobs is not None and case.rule == "rejection":
        yield "law", case.replace(drafts=drafts._replace(logprobs=None))
        flat = np.full_like(drafts.logprobs, -np.log(case.logits.shape[-1]))
        yield "flat law", case.replace(drafts=drafts._replace(logprobs=flat))


def teeth_case(rule):
    """A case in which every setting matters to some row."""
    case = make_case(rule, batch=24, seed=5, temperature=1.0, min_p=0.0)
    top_k = np.where(np.arange(24) % 2 == 0, 3, 0).astype(np.int32)
    top_p = np.where(np.arange(24) % 2 == 1, 0.3, 1.0).astype(np.float32)
    return case.replace(settings=case.settings._replace(top_k=top_k, top_p=top_p))


@pytest.mark.parametrize("rule", RULES)
def test_wrong_answers_are_told_from_right_ones(rule):
    case = teeth_case(rule)
    compare(case, by_reference(case))
    for _, other in wrong(case):
        with pytest.raises(AssertionError):
            compare(case, by_reference(other))
