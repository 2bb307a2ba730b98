"""The exact law of whole decoding: every uniform number runs through all its cells.

Laws in quarters make all thresholds rational, and between two of them a number decides
the same: one number a cell, weighted by the cell's width, stands for all. A row is one
combination of cells, all rows are the whole probability space, nothing is sampled.
That numbers of other lengths, tests and draws are independent is taken for granted.
"""

import dataclasses
import functools
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import verify
from specjax.decode import Engine, Request, Status, forget_programs, generate, programs
from specjax.decode import _step as step
from specjax.drafters import DrafterSpec, Proposal, stateless
from specjax.sampling import UniformNoise
from specjax.testing import mutants
from specjax.testing.loop_mutants import LOOPS
from specjax.testing.table_target import sequence_law, table_model

VOCAB, N_PROMPT, HEAT, STOP = 3, 3, 0.5, 2
# Most drafts a pass and tokens a sequence, rows a call: programs serve many cases.
GAMMA, MOST_NEW, BATCH = 2, 4, 4096
WIDTH = 2 * GAMMA + 1  # numbers of a pass: the drafter's, the tests', the draw's
MARGIN = 2.0**-20  # more than rounding moves a threshold


def laws(quarters: str) -> np.ndarray:
    """Reads laws given the last two tokens, the last but one first, [V, V, V]."""
    return np.reshape([int(x) / 4 for x in quarters if x != " "], (VOCAB,) * 3)


def cuts(text: str) -> tuple[float, ...]:
    """Reads the edges of a number's cells; 0 and 1 are added."""
    return (0.0, *sorted(float(Fraction(x)) for x in text.split()), 1.0)


TARGET = laws("211 031 112  121 130 112  301 211 040")
HOLES = laws("202 031 130  022 103 220  301 013 130")
FLAT = laws("112 121 211  112 022 112  121 121 211")
UNEVEN = laws("103 121 220  013 103 400  022 301 121")
WHOLE, HALVES, QUARTERS = cuts(""), cuts("1/2"), cuts("1/4 1/2 3/4")
TWELFTHS = cuts("1/4 1/3 1/2 2/3 3/4")
# Block verification of point masses of probability w and p: the first passes with
# S / (S + 1 - w), S = w (1 - p), the second with w p.
INNER = cuts("1/13 1/7 1/5 1/4 1/3 3/7 1/2 3/5 9/13 3/4")
LAST = cuts("1/16 1/8 3/16 1/4 3/8 1/2 9/16 3/4")


class Case(NamedTuple):
    """What decodes, and where its thresholds are.

    Attributes:
      rule: name of the verify rule.
      drafts: ``drawn`` from ``law``, or how point masses are chosen.
      tests: edges for the tests of a pass, by how many of them may count.
      draw: edges for the draw after tests.
      n_valid: how many drafts count after each token.
    """

    rule: str
    drafts: str
    tests: dict[int, list[tuple[float, ...]]]
    draw: tuple[float, ...] = TWELFTHS
    n_valid: tuple[int, ...] = (GAMMA,) * VOCAB
    exact: bool = True
    prompt: tuple[int, ...] = (0, 2, 1)
    n_new: int = 3
    target: np.ndarray = TARGET
    law: np.ndarray = FLAT
    stop: bool = False


TOKEN, BLOCK = {1: [QUARTERS], 2: [QUARTERS] * 2}, {1: [QUARTERS], 2: [INNER, LAST]}
DRAWN, UNLIKE = {1: [HALVES], 2: [HALVES] * 2}, {1: [TWELFTHS]}
BLOCK_DRAWN = {1: [HALVES], 2: [cuts("1/5 1/3"), QUARTERS]}
ONE, RAGGED = (1, 1, 1), (1, 2, 0)
token = functools.partial(Case, "rejection", tests=TOKEN, exact=False)
CASES = {
    "likely": token("likely"),
    "unlikely": token("unlikely", target=HOLES),
    "constant": token("constant"),
    "stop": token("constant", stop=True),
    "none": token("likely", n_valid=(0, 0, 0)),
    "ragged": token("likely", n_valid=RAGGED),
    "long": token("likely", n_valid=ONE, n_new=4, exact=True),
    "drawn": Case("rejection", "drawn", DRAWN, QUARTERS),
    "drawn_other": Case("rejection", "drawn", DRAWN, QUARTERS, prompt=(2, 0, 0)),
    "drawn_uneven": Case("rejection", "drawn", UNLIKE, n_valid=ONE, law=UNEVEN),
    "block": Case("block", "likely", BLOCK),
    "block_ragged": Case("block", "likely", BLOCK, n_valid=RAGGED, prompt=(2, 0, 1)),
    "block_constant": Case("block", "constant", BLOCK, prompt=(2, 1, 0)),
    "block_drawn": Case("block", "drawn", BLOCK_DRAWN, QUARTERS),
    "match": Case("sample_and_match", "constant", TOKEN, QUARTERS),
    "match_ragged": Case("sample_and_match", "likely", TOKEN, QUARTERS, RAGGED),
}


def cells(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Makes the numbers of every row, [3, rows, MOST_NEW * WIDTH], and its weight.

    They are in the middle of their cells, at the lower ends, and at the upper ends.
    """
    edges = []
    for room in reversed(range(case.n_new)):
        n = min(room, max(case.n_valid))
        spare = [WHOLE] * (GAMMA - n)
        own = [QUARTERS if case.drafts == "drawn" else WHOLE] * n
        tests, draw = (case.tests[n], case.draw) if n else ([], QUARTERS)
        edges += [*own, *spare, *tests, *spare, draw]
    edges += [WHOLE] * ((MOST_NEW - case.n_new) * WIDTH)
    digits = np.indices([len(e) - 1 for e in edges]).reshape(len(edges), -1)
    both = list(zip(edges, digits, strict=True))
    low, high = (np.stack([np.array(e)[d + i] for e, d in both], 1) for i in (0, 1))
    numbers = np.float32([(low + high) / 2, low + MARGIN, high - MARGIN])
    return numbers, np.prod(high - low, axis=1)


def numbers_at(row, length):
    """Picks the numbers of passes that start at some lengths, [B, WIDTH]."""
    new = jnp.clip(length - N_PROMPT, 0, MOST_NEW - 1)
    return jnp.take_along_axis(row, new[:, None] * WIDTH + jnp.arange(WIDTH), axis=1)


def uniform_noise(seed, length, n_drafts):
    """Stands in for the library's; a row's seed is all its numbers."""
    u = numbers_at(seed, length)
    return UniformNoise(accept=u[:, GAMMA : GAMMA + n_drafts], draw=u[:, -1])


@functools.cache
def drafter(drawn: bool, gamma: int):
    """Makes a drafter: inverse CDF of laws that look at the last two tokens."""

    def propose(params, context):
        ends = jnp.maximum(context.length[:, None] + jnp.array([-2, -1]), 0)
        a, b = jnp.take_along_axis(context.history, ends, axis=1).T
        u, n_valid = numbers_at(context.settings.seed, context.length), params["n"][b]
        tokens, own = [], []
        for i in range(gamma):
            own.append(params["law"][a, b])
            below = u[:, i, None] >= jnp.cumsum(own[-1], axis=-1)
            a, b = b, jnp.sum(below, axis=-1, dtype=jnp.int32)
            tokens.append(b)
        logprobs = jnp.log(jnp.stack(own, 1)) if drawn else None
        return Proposal(jnp.stack(tokens, 1), logprobs, n_valid)

    spec = DrafterSpec(name="cells", gamma=gamma)
    return stateless(spec, propose)


def options(case: Case) -> dict[str, Any]:
    """What an engine and ``generate`` need to know of a case."""
    pick = np.argmin if case.drafts == "unlikely" else np.argmax
    tokens = pick(case.target, axis=-1)
    tokens = np.ones_like(tokens) if case.drafts == "constant" else tokens
    law = case.law if case.drafts == "drawn" else np.eye(VOCAB)[tokens]
    return {
        "drafter": drafter(case.drafts == "drawn", max(case.n_valid) or GAMMA),
        "draft_params": {"law": jnp.float32(law), "n": jnp.int32(case.n_valid)},
        "rule": verify.by_name(case.rule),
        "exact": case.exact,
    }


BASE = table_model(TARGET)  # one target, so that all cases share programs


def model_of(case: Case):
    """Makes a table that has the case's laws at the temperature."""
    with np.errstate(divide="ignore"):
        params = {"table": jnp.float32(HEAT * np.log(case.target))}
    return dataclasses.replace(BASE, params=params, eos_ids=(STOP,) * case.stop)


def decode(case: Case, numbers, *, rule=None, change=None):
    """Decodes rows: tokens and origins [rows, n_new], drafts accepted, status."""
    model, own, n_new = model_of(case), options(case), case.n_new
    model, own["rule"] = change(model) if change else model, rule or own["rule"]
    engine = Engine(model, **own, batch_size=1, capacity=16)
    request = Request(prompt_ids=case.prompt, max_new_tokens=n_new, temperature=HEAT)
    engine.submit(request)
    engine.admit()
    # All rows have one prompt: one slot is prefilled, the others are copies.
    one = jax.device_get(engine.state)
    ready = jax.tree.map(lambda x: np.repeat(x, BATCH, axis=0), one)
    run = programs(dataclasses.replace(engine.plan, batch=BATCH), MOST_NEW).run
    start, new = np.full((BATCH,), N_PROMPT, np.int32), N_PROMPT + np.arange(n_new)
    parts, params = [], own["draft_params"]
    for at in range(0, len(numbers), BATCH):
        seed = np.resize(numbers[at : at + BATCH], (BATCH, numbers.shape[1]))
        state = ready.replace(settings=ready.settings._replace(seed=seed))
        state, _ = run(model.params, params, state, start, np.int32(MOST_NEW))
        state = jax.device_get(state)
        tokens = np.where(new < state.length[:, None], state.tokens[:, new], STOP)
        parts.append((tokens, state.origin[:, new], state.stats.accepted, state.status))
    return [np.concatenate(x)[: len(numbers)] for x in zip(*parts, strict=True)]


def error_of(case: Case, rows, weights) -> float:
    """The largest error of a sequence's probability; rows with errors are lost."""
    own, (tokens, _, _, status) = case.target.copy(), rows
    if case.stop:
        own[:, STOP] = np.eye(VOCAB)[STOP]
    law = sequence_law(own, case.prompt, case.n_new)
    ended = np.isin(status, [Status.LENGTH, Status.STOPPED][: 1 + case.stop])
    at = np.ravel_multi_index(tuple(tokens.T), law.shape)
    return np.max(np.abs(np.bincount(at, weights * ended, law.size) - law.ravel()))


@pytest.fixture(autouse=True, scope="module")
def _numbers_from_cells():
    # Programs traced before or now must not be found with other numbers.
    forget_programs()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "uniform_noise", uniform_noise)
        yield
    forget_programs()


@pytest.mark.parametrize("name", CASES)
def test_the_law_is_the_targets_exactly(name):
    case = CASES[name]
    numbers, weights = cells(case)
    middle, *ends = (decode(case, u) for u in numbers)
    assert error_of(case, middle, weights) < 1e-12
    # No threshold is inside a cell: with all numbers at an end, rows do the same.
    assert all(all(map(np.array_equal, end, middle)) for end in ends)
    most = 0 if name == "unlikely" else max(case.n_valid)
    assert set(middle[2]) >= set(range(most + 1)) and (most or not any(middle[2]))


@pytest.mark.slow
def test_generate_makes_the_same_rows(monkeypatch):
    case = CASES["drawn"]
    numbers, own = cells(case)[0][0], options(case)
    seeds = np.random.default_rng(0).integers(len(numbers), size=20)
    table, draft = jnp.asarray(numbers), own["drafter"]

    def propose(params, state, context):
        settings = context.settings._replace(seed=table[context.settings.seed])
        return draft.propose(params, state, context._replace(settings=settings))

    own["drafter"] = draft._replace(propose=propose)
    with monkeypatch.context() as patch:
        noise = lambda seed, *where: uniform_noise(table[seed], *where)
        patch.setattr(step, "uniform_noise", noise)
        own |= {"max_new_tokens": case.n_new, "temperature": HEAT, "batch_size": 3}
        prompts = [list(case.prompt)] * len(seeds)
        done = generate(model_of(case), prompts, seed=seeds.tolist(), **own)
    rows = decode(case, numbers[seeds])[0]
    assert [c.ids for c in done.completions] == [tuple(r) for r in rows.tolist()]


def test_numbers_used_twice_and_cells_too_wide_show():
    case = CASES["constant"]
    numbers, weights = cells(case)
    u = numbers[0].reshape(len(weights), MOST_NEW, WIDTH)
    both, first = u.copy(), np.broadcast_to(u[:, :1], u.shape)
    both[..., -1] = both[..., GAMMA]  # a test's number draws as well
    for wrong in (both, first):
        assert error_of(case, decode(case, wrong.reshape(len(u), -1)), weights) > 1e-2
    _, low, high = (decode(case, u)[0] for u in cells(case._replace(draw=QUARTERS))[0])
    assert np.any(low != high)


MISTAKES = {
    "token_bonus_before": "likely",
    "token_98": "drawn",
    "block_break": "block",
    "block_token_residual": "block_drawn",
    "match_one_number": "match",
    "stale_q": "drawn",
    "cache_one_short": "likely",
}
QUICK, *OTHERS = MISTAKES
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in OTHERS]


@pytest.mark.parametrize("name", [QUICK, *SLOW])
def test_a_mistake_in_the_rule_or_the_loop_shows(name, monkeypatch):
    # One width: rules that are mutants cannot judge a pass without drafts.
    case = CASES[MISTAKES[name]]._replace(exact=True)
    loop, rule = LOOPS.get(name), mutants.RULES.get(name)
    forget_programs()
    for owner, attribute, wrong in loop.patches if loop else ():
        monkeypatch.setattr(owner, attribute, wrong(getattr(owner, attribute)))
    wrong = {"rule": rule and rule.make(), "change": loop and loop.model}
    numbers, weights = cells(case)
    # A threshold that is a little off shows at the ends of cells alone.
    errors = [error_of(case, decode(case, u, **wrong), weights) for u in numbers]
    assert max(errors) > 1e-2
    forget_programs()
