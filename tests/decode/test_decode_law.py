"""The law of whole sequences out of the compiled loop, against the exact one."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.special import gammaincc

from specjax import verify
from specjax.decode import Engine, Plan, Request, programs
from specjax.drafters import BoundDrafter, prompt_lookup
from specjax.testing import planted, tiny_model
from specjax.testing.reference_controls import sampling_law

# One worker: the tests share compiled programs.
pytestmark = pytest.mark.xdist_group("decode_law")

VOCAB, GAMMA, NEW = 6, 3, 4
TEMPERATURE, TOP_P = 0.8, 0.9
PROMPT = (0, 1, 2, 3, 4, 5, 1, 2, 0, 1)
BATCH, CALLS = 16, 600
MODEL = tiny_model(3, vocab_size=VOCAB)

_TABLE = np.random.default_rng(2).normal(size=(VOCAB, VOCAB)) * 1.5
_TABLE[:, 4] = -np.inf  # never drawn by the drafter, drawn by the target
DRAFTS = {
    "lookup": BoundDrafter(prompt_lookup(GAMMA, min_ngram=1, max_ngram=3), None),
    "sampled": planted.sampled(GAMMA, jax.nn.log_softmax(jnp.asarray(_TABLE))),
}


_PREFIXES = np.array(list(itertools.product(range(VOCAB), repeat=NEW - 1)))


@functools.cache
def _logits():
    """Raw logits of every position after every prefix, [prefixes, NEW, V]."""
    ids = np.concatenate([np.tile(PROMPT, (len(_PREFIXES), 1)), _PREFIXES], axis=1)
    forward = jax.jit(
        lambda params, ids: MODEL.target.forward(
            params, ids[None], MODEL.target.init_cache(1, ids.shape[0])
        )[0][0, len(PROMPT) - 1 :]
    )
    return np.stack([np.asarray(forward(MODEL.params, row)) for row in ids])


def exact_law(temperature=TEMPERATURE, top_p=TOP_P):
    """Probability of each sequence of NEW tokens, [V] * NEW."""
    p = sampling_law(_logits(), temperature=temperature, top_p=top_p)
    law = p[:, NEW - 1]
    for position in range(NEW - 1):
        law = law * p[np.arange(len(p)), position, _PREFIXES[:, position]][:, None]
    return law.reshape([VOCAB] * NEW)


def g_test(counts, law):
    """P-value of the likelihood-ratio test; cells of expectation < 5 are pooled."""
    counts, expected = counts.ravel(), law.ravel() * counts.sum()
    assert not np.any(counts[expected == 0]), "drew what the law excludes"
    rare = expected < 5
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    inside = counts > 0
    g = 2 * np.sum(counts[inside] * np.log(counts[inside] / expected[inside]))
    degrees = np.sum(expected > 0) - 1
    return float(gammaincc(degrees / 2, max(g, 0.0) / 2))


def draw(draft, rule):
    """Draws BATCH * CALLS sequences from the loop that ``generate`` runs."""
    engine = Engine(
        MODEL,
        drafter=draft.drafter,
        rule=verify.by_name(rule),
        batch_size=BATCH,
        capacity=64,
    )
    plan: Plan = engine.plan
    assert plan.widths == (1, GAMMA + 1)
    request = Request(
        prompt_ids=PROMPT, max_new_tokens=NEW, temperature=TEMPERATURE, top_p=TOP_P
    )
    for row in range(BATCH):
        engine._insert(row, dataclasses.replace(request, id=row))
    # The slots just after the prompt: reused with other seeds, for speed.
    ready = jax.device_get(engine._state)
    run = programs(plan, NEW).run
    start = np.full((BATCH,), len(PROMPT), np.int32)
    out = []
    accepted = 0
    for call in range(CALLS):
        seeds = np.arange(BATCH, dtype=np.uint32) + np.uint32(1000 + BATCH * call)
        state = ready.replace(settings=ready.settings._replace(seed=seeds))
        _, snapshot = run(MODEL.params, draft.params, state, start, np.int32(NEW))
        assert np.all(snapshot.length == len(PROMPT) + NEW)
        snapshot = jax.device_get(snapshot)
        tokens, at = snapshot.tokens, start - snapshot.start
        out.append(
            np.stack([row[i : i + NEW] for row, i in zip(tokens, at, strict=True)])
        )
        accepted += int(np.sum(snapshot.stats.accepted))
    assert accepted > BATCH * CALLS / 4
    return np.concatenate(out)


def _counts(draws, axes):
    """Counts of the tokens at some positions, [V] * len(axes)."""
    table = np.zeros([VOCAB] * len(axes), np.int64)
    np.add.at(table, tuple(draws[:, axis] for axis in axes), 1)
    return table


_SUBSETS = [
    *itertools.combinations(range(NEW), 1),
    *itertools.combinations(range(NEW), 2),
]


@pytest.fixture(scope="module")
def law():
    return exact_law()


@pytest.mark.parametrize(
    ("rule", "name"),
    [
        ("rejection", "sampled"),
        pytest.param("rejection", "lookup", marks=pytest.mark.slow),
        pytest.param("coupled", "lookup", marks=pytest.mark.slow),
    ],
)
def test_the_law_of_sequences_is_the_targets(law, rule, name):
    draws = draw(DRAFTS[name], rule)
    # Also where rejection, correction and bonus follow one another: the whole joint.
    for axes in [*_SUBSETS, tuple(range(NEW))]:
        others = tuple(i for i in range(NEW) if i not in axes)
        p_value = g_test(_counts(draws, axes), law.sum(axis=others))
        assert p_value > 1e-4, (axes, p_value)
    # The test sees a law that is a little off: another temperature, another filter.
    for wrong in (exact_law(TEMPERATURE + 0.1), exact_law(TEMPERATURE, 1.0)):
        off = [
            g_test(
                _counts(draws, axes), wrong.sum(axis=tuple(set(range(NEW)) - {*axes}))
            )
            for axes in _SUBSETS
        ]
        assert min(off) < 1e-6


def test_the_law_has_filtered_tokens_and_no_certainty(law):
    """Otherwise the test above would show little."""
    assert law.sum() == pytest.approx(1.0)
    assert np.mean(law == 0) > 0.3
    for position in range(NEW):
        others = tuple(i for i in range(NEW) if i != position)
        assert law.sum(axis=others).max() < 0.9
