"""A row's logits in exact mode: what they may not depend on, pinned on this backend."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import bench
from specjax.ops.platform import compiler_options, row_invariant
from specjax.testing import tiny_model

DTYPES = ["float32", "bfloat16"]
LENGTH, WIDTH, CAPACITY, VOCAB = 300, 7, 496, 256


@pytest.fixture(scope="module", params=DTYPES)
def scored(request):
    """A model, a text longer than a block of attention, and a function that scores."""
    model = tiny_model(1, dtype=request.param)
    text = np.random.default_rng(0).integers(0, VOCAB, LENGTH).astype(np.int32)
    target = model.target

    @jax.jit
    def fill(params, tokens, cache):
        with row_invariant():
            _, _, cache = target.forward(params, tokens, cache, with_logits=False)
        return target.commit(cache, jnp.full((tokens.shape[0],), tokens.shape[1]))

    def one_pass(params, tokens, cache):
        with row_invariant():
            return target.forward(params, tokens, cache)[0]

    run = jax.jit(one_pass, compiler_options=compiler_options())

    def score(blocks, starts):
        """Logits of blocks [B, T], each standing at a position of the text."""
        blocks = np.asarray(blocks, np.int32)
        cache = fill(
            model.params,
            np.repeat(text[None], len(blocks), axis=0),
            target.init_cache(len(blocks), CAPACITY),
        )
        cache = cache.replace(length=jnp.asarray(starts, jnp.int32))
        return np.asarray(run(model.params, blocks, cache))

    return text, score


# Around the end of the first block of attention, and elsewhere.
STARTS = (3, 100, 250, 256, 280)


@pytest.fixture(scope="module")
def alone(scored):
    """The logits of ids 3 to 299, from passes of one row in a batch of one."""
    text, score = scored
    return {
        at: score([[text[at]]], [at])[0, 0]
        for start in STARTS
        for at in range(start, start + WIDTH)
    }


@pytest.mark.parametrize("start", STARTS)
def test_its_index_in_the_block_and_the_width(scored, alone, start):
    text, score = scored
    for width in (2, 5, WIDTH):
        logits = score([text[start : start + width]], [start])[0]
        for i in range(width):
            np.testing.assert_array_equal(logits[i], alone[start + i])


def test_the_rows_after_it(scored, alone):
    text, score = scored
    rng = np.random.default_rng(2)
    for keep in (1, 3, 6):
        block = text[100 : 100 + WIDTH].copy()
        block[keep:] = rng.integers(0, VOCAB, WIDTH - keep)
        logits = score([block], [100])[0]
        for i in range(keep):
            np.testing.assert_array_equal(logits[i], alone[100 + i])


@pytest.mark.slow
@pytest.mark.parametrize("batch", [2, 5])
def test_the_batch_and_where_in_the_cache_the_others_stand(scored, alone, batch):
    text, score = scored
    starts = [STARTS[i % len(STARTS)] for i in range(batch)]
    logits = score([text[s : s + WIDTH] for s in starts], starts)
    for row, start in enumerate(starts):
        for i in range(WIDTH):
            np.testing.assert_array_equal(logits[row, i], alone[start + i])


@pytest.mark.parametrize("dtype", DTYPES)
def test_flips_are_counted_where_bits_differ(dtype):
    # Wide enough that products of one row and of several round differently.
    model = tiny_model(1, width=192, dtype=dtype)
    rng = np.random.default_rng(3)
    texts = [rng.integers(0, VOCAB, n).tolist() for n in (40, 23)]
    exact = bench.count_flips(model, texts, width=WIDTH, exact=True, start=(0, 3))
    assert exact.n_positions == 60
    assert (exact.n_different, exact.largest_difference, exact.flip_rate) == (0, 0, 0)
    free = bench.count_flips(model, texts, width=WIDTH, exact=False)
    assert free.n_positions == 63 and free.largest_difference < 0.2
    assert (free.n_different > 0) == (free.largest_difference > 0)
    if dtype == "float32":
        assert free.n_different > 0
    # Only near ties can flip.
    assert not np.any(free.flipped & (free.margins > 2 * free.largest_difference))
    bins = free.histogram()
    assert sum(n for _, _, n, _ in bins) == 63
    assert sum(n for _, _, _, n in bins) == free.flipped.sum()


@pytest.mark.parametrize(
    ("match", "texts", "width"),
    [("width=1 must be", [[1, 2, 3]], 1), ("as long as a pass of width=9", [[1]], 9)],
)
def test_what_cannot_be_compared_is_refused(match, texts, width):
    with pytest.raises(ValueError, match=match):
        bench.count_flips(tiny_model(), texts, width=width, exact=True)
