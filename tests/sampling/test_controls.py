"""Controls against a reference that knows plain decoding only."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decode import Controls
from specjax.sampling import (
    UNCONSTRAINED,
    ControlSpec,
    ControlState,
    MaskState,
    Penalties,
    advance_controls,
    apply_controls,
    init_controls,
)
from specjax.testing.reference_controls import controlled_logits
from specjax.text import TokenMask

BATCH, VOCAB, SIZE, N_STATES = 3, 7, 24, 4
ALL = ControlSpec(True, True, True, True, N_STATES)

_APPLY = jax.jit(apply_controls)
_ADVANCE = jax.jit(advance_controls)


class Row:
    """One row as plain decoding sees it: a prompt and its settings."""

    def __init__(self, rng, prompt, transitions):
        self.prompt = [int(token) for token in prompt]
        self.start = int(rng.integers(-1, N_STATES))
        mask = None
        if self.start != UNCONSTRAINED:
            mask = TokenMask(transitions, self.start)
        forced = {}
        if rng.random() < 0.5:
            forced = {int(rng.integers(5)): int(rng.integers(VOCAB))}
        self.controls = Controls(
            repetition_penalty=rng.choice([1.0, 1.3, 0.8]),
            presence_penalty=rng.choice([0.0, 0.7, -0.4]),
            frequency_penalty=rng.choice([0.0, 0.3, -0.2]),
            logit_bias=dict(enumerate(rng.normal(size=VOCAB).tolist())),
            banned_ids=(int(rng.integers(VOCAB)),),
            forced_ids=forced,
            min_new_tokens=int(rng.integers(4)),
            token_mask=mask,
        )
        self.stops = [int(rng.integers(VOCAB)), -1]

    def logits(self, logits, output):
        """The controlled logits after some output; None where it is not allowed."""
        mask = self.controls.token_mask
        if mask is not None and not _reachable(mask, output):
            return None
        return controlled_logits(
            logits,
            self.controls,
            prompt_ids=self.prompt,
            output_ids=output,
            stop_ids=self.stops[:1],
        )


def _reachable(mask, output):
    state = mask.start
    for token in output:
        state = mask.transitions[state, token]
        if state < 0:
            return False
    return True


def _table(rng):
    transitions = rng.integers(-1, N_STATES, (N_STATES, VOCAB)).astype(np.int32)
    transitions[:, 0] = np.arange(N_STATES)  # no dead end
    return transitions


def _state(rows, outputs, transitions):
    """The controls of rows after outputs, written down and not advanced to."""
    n = lambda name: np.asarray([getattr(r.controls, name) for r in rows], np.float32)
    in_prompt = np.zeros((len(rows), VOCAB), bool)
    counts = np.zeros((len(rows), VOCAB), np.int32)
    forced = np.full((len(rows), SIZE), -1, np.int32)
    bias = np.zeros((len(rows), VOCAB), np.float32)
    states, least = [], []
    for r, (row, output) in enumerate(zip(rows, outputs, strict=True)):
        in_prompt[r, row.prompt] = True
        for token in output:
            counts[r, token] += 1
        for at, token in row.controls.forced_ids.items():
            forced[r, len(row.prompt) + at] = token
        bias[r] = list(row.controls.logit_bias.values())
        bias[r, row.controls.banned_ids] = -np.inf
        least.append(len(row.prompt) + row.controls.min_new_tokens)
        state = row.start
        for token in output:
            state = state if state < 0 else transitions[state, token]
        states.append(state)
    return ControlState(
        penalties=Penalties(
            repetition=n("repetition_penalty"),
            presence=n("presence_penalty"),
            frequency=n("frequency_penalty"),
            in_prompt=in_prompt,
            counts=counts,
        ),
        bias=bias,
        forced=forced,
        min_length=np.asarray(least, np.int32),
        mask=MaskState(np.asarray(states, np.int32), transitions),
    )


def _rows(rng, transitions):
    sizes = rng.integers(1, 6, BATCH)
    return [Row(rng, rng.integers(0, VOCAB, n), transitions) for n in sizes]


def _legal_output(rng, row, transitions, n):
    output, state = [], row.start
    for _ in range(n):
        allowed = (
            np.arange(VOCAB) if state < 0 else np.flatnonzero(transitions[state] >= 0)
        )
        output.append(int(rng.choice(allowed)))
        state = state if state < 0 else transitions[state, output[-1]]
    return output


# Chains of several lengths, and trees: row 0 is the pending token.
SHAPES = [(), (0,), (0, 1, 2, 3), (0, 0, 1, 1, 2, 5), (0, 1, 1, 0, 4)]


@pytest.mark.parametrize(
    ("parents", "chain"),
    [(p, False) for p in SHAPES] + [(p, True) for p in SHAPES[:3]],
    ids=str,
)
@pytest.mark.parametrize("seed", range(3))
def test_every_row_is_treated_as_plain_decoding_would(parents, seed, chain):
    rng = np.random.default_rng(seed)
    transitions = _table(rng)
    rows = _rows(rng, transitions)
    outputs = [_legal_output(rng, row, transitions, rng.integers(5)) for row in rows]
    drafts = rng.integers(0, VOCAB, (BATCH, len(parents))).astype(np.int32)
    logits = rng.normal(size=(BATCH, len(parents) + 1, VOCAB)).astype(np.float32) * 3
    got = _APPLY(
        logits,
        _state(rows, outputs, transitions),
        tokens=drafts,
        length=np.asarray(
            [len(r.prompt) + len(o) for r, o in zip(rows, outputs, strict=True)]
        ),
        stop_ids=np.asarray([r.stops for r in rows], np.int32),
        parents=None if chain else np.asarray([parents] * BATCH, np.int32) - 1,
    )
    n_checked = 0
    for r, row in enumerate(rows):
        paths = [[]]
        for draft, parent in enumerate(parents):
            paths.append([*paths[parent], int(drafts[r, draft])])
        for i, path in enumerate(paths):
            expected = row.logits(logits[r, i], outputs[r] + path)
            if expected is not None:
                np.testing.assert_allclose(got[r, i], expected, rtol=1e-5, atol=1e-5)
                n_checked += 1
    assert n_checked >= BATCH


def test_a_rows_bits_do_not_depend_on_the_width():
    rng = np.random.default_rng(7)
    transitions = _table(rng)
    rows = _rows(rng, transitions)
    outputs = [_legal_output(rng, row, transitions, 9) for row in rows]
    logits = rng.normal(size=(BATCH, 9, VOCAB)).astype(np.float32) * 3
    whole = [output[:1] for output in outputs]
    wide = _APPLY(
        logits,
        _state(rows, whole, transitions),
        tokens=np.asarray([o[1:] for o in outputs], np.int32),
        length=np.asarray([len(r.prompt) + 1 for r in rows]),
        stop_ids=np.asarray([r.stops for r in rows], np.int32),
    )
    for i in range(9):
        narrow = _APPLY(
            logits[:, i : i + 1],
            _state(rows, [o[: i + 1] for o in outputs], transitions),
            tokens=np.zeros((BATCH, 0), np.int32),
            length=np.asarray([len(r.prompt) + 1 + i for r in rows]),
            stop_ids=np.asarray([r.stops for r in rows], np.int32),
        )
        np.testing.assert_array_equal(narrow[:, 0], wide[:, i])


def test_only_committed_tokens_move_the_controls():
    rng = np.random.default_rng(3)
    transitions = _table(rng)
    rows = _rows(rng, transitions)
    outputs = [_legal_output(rng, row, transitions, 6) for row in rows]
    n_committed = np.asarray([0, 2, 6], np.int32)
    before = _state(rows, [[]] * BATCH, transitions)
    got = _ADVANCE(before, np.asarray(outputs, np.int32), n_committed)
    kept = [o[:n] for o, n in zip(outputs, n_committed, strict=True)]
    jax.tree.map(np.testing.assert_array_equal, got, _state(rows, kept, transitions))


def test_what_is_off_is_not_there():
    empty = init_controls(ControlSpec(), batch=2, size=8, vocab_size=5)
    assert not jax.tree.leaves(empty)
    text = jax.jit(apply_controls).lower(
        jnp.zeros((2, 3, 5)),
        empty,
        tokens=jnp.zeros((2, 2), jnp.int32),
        length=jnp.ones((2,), jnp.int32),
        stop_ids=jnp.zeros((2, 1), jnp.int32),
    )
    assert "stablehlo.add" not in text.as_text()


def test_empty_rows_change_nothing():
    logits = np.random.default_rng(0).normal(size=(2, 3, VOCAB)).astype(np.float32)
    controls = init_controls(ALL, batch=2, size=SIZE, vocab_size=VOCAB)
    got = _APPLY(
        logits,
        controls,
        tokens=np.zeros((2, 2), np.int32),
        length=np.asarray([4, SIZE - 1]),  # the second reaches beyond the buffer
        stop_ids=np.full((2, 1), 3, np.int32),
    )
    np.testing.assert_array_equal(got, logits)


@pytest.mark.parametrize("seen", [dict(covers=True), dict(covers=False)])
def test_a_loop_covers_what_it_carries(seen):
    carried = ControlSpec(penalties=True, n_mask_states=8)
    wanted = ControlSpec(penalties=True, bias=not seen["covers"])
    assert carried.covers(wanted) is seen["covers"]
