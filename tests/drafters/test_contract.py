"""What every drafter must do, for the whole zoo and the planted ones."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import drafters, trees
from specjax.decode import prefill_chunks
from specjax.drafters import DraftContext, Scored, TargetView
from specjax.ops.platform import row_invariant
from specjax.sampling import Settings
from specjax.testing import planted, tiny

VOCAB, GAMMA, CAPACITY = 11, 4, 80
_RNG = np.random.default_rng(0)
TEXTS = [_RNG.integers(0, VOCAB, 60).tolist() for _ in range(3)]
TEXTS[1] = (TEXTS[1][:7] * 9)[:60]
TABLE = jax.nn.log_softmax(
    jnp.asarray(_RNG.normal(size=(VOCAB, VOCAB)) * 2, jnp.float32)
)
TABLE = jax.nn.log_softmax(jnp.where(TABLE < -5, -jnp.inf, TABLE))

ZOO = {
    name: planted.BoundDrafter(drafters.by_name(name, GAMMA), None)
    for name in drafters.REGISTRY
}
ZOO["prompt_lookup_short"] = planted.BoundDrafter(
    drafters.prompt_lookup(GAMMA, min_ngram=1, max_ngram=2), None
)
PLANTED = {
    "right": planted.right(GAMMA, VOCAB, TEXTS),
    "wrong": planted.wrong(GAMMA, VOCAB, TEXTS),
    "partly_right": planted.partly_right(GAMMA, VOCAB, TEXTS),
    "outside_vocabulary": planted.outside_vocabulary(GAMMA, VOCAB, TEXTS),
    "silent": planted.silent(GAMMA, VOCAB, TEXTS),
    "hashed": planted.hashed(GAMMA, VOCAB, TEXTS),
    "constant": planted.constant(GAMMA, VOCAB, [3, VOCAB, -1, 5]),
    "sampled": planted.sampled(GAMMA, TABLE),
    "remembering": planted.remembering(GAMMA, VOCAB, TEXTS),
}
_DRAFT = tiny.tiny_model(4, vocab_size=VOCAB, width=16)
MODELS = {
    "model": drafters.BoundDrafter(drafters.model(_DRAFT.target, GAMMA), _DRAFT.params),
    "model_tree": drafters.BoundDrafter(
        drafters.model(_DRAFT.target, trees.Topology((-1, -1, 0, 1))), _DRAFT.params
    ),
    "truncated": drafters.truncate(drafters.prompt_lookup(GAMMA + 2), GAMMA),
}
# What works on the cache of a target: the rows below drive that target too.
_TARGET = tiny.tiny_model(5, vocab_size=VOCAB)
ON_TARGET = {
    "early_exit": drafters.BoundDrafter(
        drafters.early_exit(_TARGET.target, 1, GAMMA), None
    ),
    "layer_skip": drafters.layer_skip(_TARGET, GAMMA, ff=(0,)),
    "sparse_kv": drafters.sparse_kv(_TARGET, GAMMA, sinks=2, window=5),
    "bfloat16": drafters.lower_precision(_TARGET, GAMMA),
    "int4": drafters.quantized(_TARGET, GAMMA, bits=4),
    "adaptive": drafters.adaptive(
        drafters.layer_skip(_TARGET, GAMMA, attention=(1,)),
        drafters.PassCosts(0.5, (1.0, 1.1, 1.1, 1.2, 1.2)),
    ),
}
ON_TARGET["fallback_to_target"] = drafters.fallback(
    drafters.prompt_lookup(GAMMA, min_ngram=1), ON_TARGET["layer_skip"], least=2
)
MODELS["token_recycling"] = drafters.BoundDrafter(
    drafters.token_recycling(VOCAB, GAMMA), drafters.successor_table(TEXTS[:2], VOCAB)
)
MODELS["fallback"] = drafters.fallback(
    drafters.prompt_lookup(GAMMA, min_ngram=1), MODELS["model"], least=2
)
EVERY = ZOO | PLANTED | MODELS | ON_TARGET

# It knows the end of one text, half of another and nothing of the third.
EVERY["suffix_datastore"] = drafters.BoundDrafter(
    drafters.suffix(GAMMA, min_match=1),
    drafters.build_datastore([TEXTS[0][20:], TEXTS[2][:30]], size=128),
)

each = pytest.mark.parametrize("name", EVERY)


@functools.cache
def _jitted(drafter):
    """A drafter whose functions are compiled, to be driven fast.

    Row-invariant arithmetic makes a model's drafts the same bits however it came to
    have read the text.
    """

    def compiled(function):
        @jax.jit
        def call(*args):
            with row_invariant():
                return function(*args)

        return call

    return drafter._replace(
        prefill=compiled(drafter.prefill),
        reset_row=compiled(drafter.reset_row),
        propose=compiled(drafter.propose),
        commit=compiled(drafter.commit),
    )


@jax.jit
def _read(tokens, cache, row, n):
    """Lets the target read a pass's tokens, and keeps n of each row."""
    with row_invariant():
        _, _, cache = _TARGET.target.forward(_TARGET.params, tokens, cache, row=row)
    return _TARGET.target.commit(cache, n)


class Rows:
    """Drives a drafter as the decode loop does, over texts that are given."""

    def __init__(self, name, texts, seeds=None):
        drafter, self.params = EVERY[name]
        self.drafter = _jitted(drafter)
        self.texts = [list(text) for text in texts]
        batch = len(texts)
        seeds = list(range(batch)) if seeds is None else seeds
        self.settings = Settings.full(batch, temperature=0.8)._replace(
            seed=jnp.asarray(seeds, jnp.uint32)
        )
        self.state = self.drafter.init(batch, CAPACITY)
        self.cache = None
        if drafter.spec.on_target:
            self.cache = _TARGET.target.init_cache(batch, CAPACITY)
        for row, text in enumerate(texts):
            at = jnp.int32(row)
            self.state = self.drafter.reset_row(self.state, at)
            sent = 0
            for size, n_real in prefill_chunks(len(text) - 1):
                chunk = np.zeros((1, size), np.int32)
                chunk[0, :n_real] = text[sent : sent + n_real]
                self.state = self.drafter.prefill(
                    self.params, self.state, at, chunk, jnp.int32(n_real), None
                )
                self.read(chunk, at, n_real)
                sent += n_real
        self.n_new = [len(text) for text in texts]

    def read(self, tokens, row=None, n_real=None):
        """Lets the target read tokens: of one row, or of each its own number."""
        if self.cache is None:
            return
        n = n_real if row is None else jnp.zeros_like(self.cache.length)
        if row is not None:
            n = n.at[row].set(n_real)
        self.cache = _read(tokens, self.cache, row, jnp.asarray(n, jnp.int32))

    def context(self, junk=None):
        history = np.zeros((len(self.texts), CAPACITY + 16), np.int32)
        if junk is not None:
            history[:] = junk
        for row, text in zip(history, self.texts, strict=True):
            row[: len(text)] = text
        return DraftContext(
            history=jnp.asarray(history),
            length=jnp.asarray([len(text) for text in self.texts], jnp.int32),
            settings=self.settings,
            features=None,
            n_new=jnp.asarray(self.n_new, jnp.int32),
            target=self.cache and TargetView(_TARGET.params, self.cache),
            scored=self.scored(),
        )

    def scored(self):
        """Says that nothing was scored: what is learnt of that has tests of its own."""
        if not self.drafter.spec.n_top:
            return None
        batch, top = len(self.texts), self.drafter.spec.n_top
        block = jnp.zeros((batch, GAMMA + 1), jnp.int32)
        none = jnp.zeros((batch,), jnp.int32)
        return Scored(block, none, jnp.zeros((*block.shape, top), jnp.int32))

    def propose(self, junk=None):
        proposal, self.state = self.drafter.propose(
            self.params, self.state, self.context(junk)
        )
        if self.cache is not None and proposal.cache is not None:
            np.testing.assert_array_equal(proposal.cache.length, self.cache.length)
            self.cache = proposal.cache
        return proposal

    def commit(self, ids):
        """Appends ids to each row."""
        block = np.zeros((len(ids), GAMMA + 1), np.int32)
        for row, text, new in zip(block, self.texts, ids, strict=True):
            row[: len(new)] = [text[-1], *new][: len(new)]
        self.read(block, n_real=[len(new) for new in ids])
        for text, new in zip(self.texts, ids, strict=True):
            text += new
        self.n_new = [len(new) for new in ids]
        self.state = self.drafter.commit(self.params, self.state, self.context())


def _counted(proposal):
    """A proposal's rows, without what does not count."""
    rows = []
    for row, n in enumerate(np.asarray(proposal.n_valid)):
        tokens = np.asarray(proposal.tokens)[row, :n].tolist()
        laws = None
        if proposal.logprobs is not None:
            laws = np.asarray(proposal.logprobs)[row, :n].tobytes()
        rows.append((tokens, laws))
    return rows


def _shapes(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype), tree)


@each
def test_the_state_is_a_fixed_point(name):
    drafter, params = EVERY[name]
    context = Rows(name, [t[:9] for t in TEXTS]).context()
    first = drafter.init(3, CAPACITY)
    row, chunk = jnp.int32(1), jnp.zeros((1, 16), jnp.int32)
    calls = {
        "reset_row": (drafter.reset_row, first, row),
        "prefill": (drafter.prefill, params, first, row, chunk, jnp.int32(5), None),
        "propose": (drafter.propose, params, first, context),
        "commit": (drafter.commit, params, first, context),
    }
    after = {where: jax.eval_shape(*call) for where, call in calls.items()}
    after["propose"] = after["propose"][1]
    for where, state in after.items():
        assert jax.tree.structure(state) == jax.tree.structure(first), where
        assert _shapes(state) == _shapes(first), where


@each
@pytest.mark.parametrize("length", [1, 2, 17, 58, 60])
def test_a_proposal_has_its_shape_and_range(name, length):
    drafter, _ = EVERY[name]
    gamma = drafter.spec.gamma
    proposal = Rows(name, [t[:length] for t in TEXTS]).propose()
    assert proposal.tokens.shape == (3, gamma)
    assert proposal.tokens.dtype == jnp.int32
    assert proposal.n_valid.shape == (3,) and proposal.n_valid.dtype == jnp.int32
    assert np.all((0 <= proposal.n_valid) & (proposal.n_valid <= gamma))
    if name not in ("outside_vocabulary", "constant"):
        for tokens, _ in _counted(proposal):
            assert all(0 <= token < VOCAB for token in tokens)
    if proposal.logprobs is not None:
        assert proposal.logprobs.shape == (3, gamma, VOCAB)
        assert proposal.logprobs.dtype == jnp.float32
        assert not np.any(np.isnan(proposal.logprobs))


@each
def test_rows_are_independent(name):
    texts = [TEXTS[0][:23], TEXTS[1][:41], TEXTS[2][:2]]
    together = _counted(Rows(name, texts).propose())
    for row, text in enumerate(texts):
        assert _counted(Rows(name, [text], [row]).propose()) == [together[row]]


@each
def test_junk_beyond_the_length_changes_nothing(name):
    texts = [TEXTS[0][:23], TEXTS[1][:41], TEXTS[2][:2]]
    clean = _counted(Rows(name, texts).propose())
    noise = np.random.default_rng(1).integers(0, VOCAB, (3, CAPACITY + 16))
    for junk in (-999, VOCAB + 3, TEXTS[0][22], noise):
        assert _counted(Rows(name, texts).propose(junk)) == clean


# What learns from its passes drafts by them, not by the text alone. Nodes of a tree
# were read among their cousins: the same to rounding, for which it has its own test.
@pytest.mark.parametrize(
    "name",
    [n for n in EVERY if n not in ("adaptive", "lookahead", "model_tree")],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_after_any_accepted_count_the_draft_is_that_of_a_fresh_start(name, seed):
    """Also after GAMMA + 1 tokens at once: full acceptance and the bonus."""
    rng = np.random.default_rng(seed)
    lengths = [3, 20, 37]
    rows = Rows(name, [t[:n] for t, n in zip(TEXTS, lengths, strict=True)])
    counts = [GAMMA + 1, 1, *rng.integers(1, GAMMA + 2, 2)]
    for count in counts:
        rows.propose()
        new = []
        for row, text in enumerate(rows.texts):
            n = 0 if row == 1 and count == 1 else int(count)  # a row may stand still
            new.append(TEXTS[row][len(text) : len(text) + n])
        rows.commit(new)
        fresh = Rows(name, rows.texts)
        assert _counted(rows.propose()) == _counted(fresh.propose())


@each
def test_a_row_that_is_used_again_starts_afresh(name):
    """A long text, then a short one in the same row."""
    rows = Rows(name, [TEXTS[0][:50], TEXTS[1][:50], TEXTS[2][:50]])
    rows.propose()
    rows.commit([t[50:53] for t in TEXTS])
    again, fresh = (
        Rows(name, [t[:5] for t in TEXTS]),
        Rows(name, [t[:5] for t in TEXTS]),
    )
    state = rows.state
    for row, text in enumerate(again.texts):
        state = rows.drafter.reset_row(state, jnp.int32(row))
        chunk = np.full((1, 16), 7, np.int32)
        chunk[0, :4] = text[:4]
        state = rows.drafter.prefill(
            rows.params, state, jnp.int32(row), chunk, jnp.int32(4), None
        )
    again.state = state
    assert _counted(again.propose()) == _counted(fresh.propose())


@each
def test_the_second_call_does_not_compile(name):
    drafter, params = EVERY[name]
    traces = []

    @jax.jit
    def propose(params, state, context):
        traces.append(1)
        return drafter.propose(params, state, context)

    for length in (1, 9, 30):
        rows = Rows(name, [t[:length] for t in TEXTS], [length, 5, 6])
        state = rows.state
        for _ in range(2):
            _, state = propose(params, state, rows.context())
    assert len(traces) == 1


@pytest.mark.parametrize("name", ZOO)
def test_equal_calls_give_the_identical_drafter(name):
    """Otherwise equal plans would not share compiled programs."""
    if name in drafters.REGISTRY:
        assert drafters.by_name(name, GAMMA) is drafters.by_name(name, GAMMA)
    else:
        again = drafters.prompt_lookup(GAMMA, min_ngram=1, max_ngram=2)
        assert again is ZOO[name].drafter


def test_the_planted_ones_are_what_they_say():
    texts = [t[:20] for t in TEXTS]
    truth = [t[20 : 20 + GAMMA] for t in TEXTS]
    draft = lambda name: [tokens for tokens, _ in _counted(Rows(name, texts).propose())]
    assert draft("right") == draft("remembering") == truth
    assert draft("silent") == [[], [], []]
    assert np.all(np.asarray(draft("wrong")) != np.asarray(truth))
    assert draft("constant") == [[3, VOCAB, -1, 5]] * 3
    right_runs, foreign, n_hashed = set(), set(), set()
    for length in range(2, 56):
        texts = [t[:length] for t in TEXTS]
        truth = [t[length : length + GAMMA] for t in TEXTS]
        for got, wanted in zip(draft("partly_right"), truth, strict=True):
            equal = [a == b for a, b in zip(got, wanted, strict=True)]
            k = (equal + [False]).index(False)
            assert not any(equal[k:])
            right_runs.add(k)
        for tokens in draft("outside_vocabulary"):
            foreign |= {t for t in tokens if not 0 <= t < VOCAB}
        n_hashed |= {len(tokens) for tokens in draft("hashed")}
    assert right_runs == n_hashed == set(range(GAMMA + 1))
    assert foreign == {-1, VOCAB}
    unknown = [[1, 2, 3]] * 3
    assert np.all(Rows("right", unknown).propose().n_valid == 0)


def test_tokens_are_drawn_from_the_law_they_come_with():
    """Frequencies of each draft position given the token before it."""
    rows = 4000
    drafter, params = EVERY["sampled"]
    context = DraftContext(
        history=jnp.full((rows, 4), 2, jnp.int32),
        length=jnp.full((rows,), 3, jnp.int32),
        settings=Settings.full(rows)._replace(seed=jnp.arange(rows, dtype=jnp.uint32)),
        features=None,
        n_new=jnp.ones((rows,), jnp.int32),
    )
    proposal, _ = jax.jit(drafter.propose)(params, (), context)
    before = np.concatenate(
        [np.full((rows, 1), 2), np.asarray(proposal.tokens)[:, :-1]], axis=1
    )
    np.testing.assert_array_equal(
        np.asarray(proposal.logprobs), np.asarray(TABLE)[before]
    )
    law = np.exp(np.asarray(TABLE, np.float64))
    expected = np.zeros(VOCAB)
    expected[2] = 1.0
    for position in range(GAMMA):
        expected = expected @ law
        counts = np.bincount(proposal.tokens[:, position], minlength=VOCAB)
        sigma = np.sqrt(rows * expected * (1 - expected))
        assert np.all(np.abs(counts - rows * expected) < 4.5 * sigma + 1e-6)
