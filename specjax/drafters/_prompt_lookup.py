"""Prompt lookup: the text so far as the draft model.

References: Saxena, "Prompt Lookup Decoding", 2023; Yang et al., "Inference with
Reference", arXiv:2304.04487.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from specjax.drafters._protocol import (
    DraftContext,
    Drafter,
    DrafterSpec,
    Proposal,
    check_gamma,
    stateless,
)
from specjax.typing import Array, Int, Params


@functools.cache
def prompt_lookup(gamma: int = 6, *, min_ngram: int = 2, max_ngram: int = 8) -> Drafter:
    """Proposes what followed the last occurrence of the text's longest suffix.

    The whole history of the row, prompt and output, is searched for the longest
    earlier match of its last tokens, ``min_ngram`` to ``max_ngram`` of them; of
    equally long matches the most recent wins. The tokens that followed it are
    proposed as point masses. A match so recent that fewer than ``gamma`` tokens
    follow it is a repetition, and is continued periodically.

    Args:
      gamma: draft tokens a pass.
      min_ngram: shortest match that counts. Short matches are often wrong, and a
        wrong draft costs a wide pass.
      max_ngram: longest match looked for.

    Returns:
      A drafter without state. Equal calls give the identical drafter.

    Raises:
      ValueError: gamma or an n-gram length is out of range.
    """
    check_gamma(gamma)
    if not 1 <= min_ngram <= max_ngram:
        raise ValueError(
            f"prompt_lookup needs 1 <= min_ngram <= max_ngram; got {min_ngram=}, "
            f"{max_ngram=}."
        )

    def propose(params: Params | None, context: DraftContext) -> Proposal:
        find = functools.partial(
            _find, gamma=gamma, min_ngram=min_ngram, max_ngram=max_ngram
        )
        tokens, n_valid = jax.vmap(find)(context.history, context.length)
        return Proposal(tokens=tokens, logprobs=None, n_valid=n_valid)

    return stateless(DrafterSpec(name="prompt_lookup", gamma=gamma), propose)


def matched_lengths(
    history: Int[Array, " L"], length: Int[Array, ""], most: int
) -> Int[Array, " L"]:
    """Counts how many tokens before each index are those that end the text.

    Args:
      history: the text; junk beyond its length.
      length: of the text, [].
      most: longest match counted.

    Returns:
      For each index, the length of the longest common suffix of the text up to and
      with it and of the whole text, at most ``most``; 0 for the text's own end and
      beyond.
    """
    size = history.shape[0]
    end = jnp.arange(size)  # a candidate match ends at this index
    run = jnp.ones((size,), bool)
    matched = jnp.zeros((size,), jnp.int32)
    for k in range(min(most, size)):
        wanted = history[jnp.maximum(length - 1 - k, 0)]
        shifted = jnp.concatenate(
            [jnp.full((k,), -1, history.dtype), lax.slice_in_dim(history, 0, size - k)]
        )
        run &= (shifted == wanted) & (end >= k) & (length - 1 - k >= 0)
        matched += run.astype(jnp.int32)
    return jnp.where(end < length - 1, matched, 0)


def _find(
    history: Int[Array, " L"],
    length: Int[Array, ""],
    *,
    gamma: int,
    min_ngram: int,
    max_ngram: int,
) -> tuple[Int[Array, " G"], Int[Array, ""]]:
    """Searches one row; returns its draft and how much of it counts."""
    size = history.shape[0]
    end = jnp.arange(size)
    matched = matched_lengths(history, length, max_ngram)
    # Longest first, then most recent, as one number: both are below 2**15 or so.
    best = jnp.argmax(jnp.where(matched > 0, matched * size + end, -1))
    found = matched[best] >= min_ngram
    start = best + 1
    period = jnp.maximum(length - start, 1)
    tokens = history[jnp.clip(start + jnp.arange(gamma) % period, 0, size - 1)]
    return tokens.astype(jnp.int32), jnp.where(found, gamma, 0).astype(jnp.int32)
