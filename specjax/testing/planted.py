"""Drafters and targets with a planted behaviour, to test what is built on them.

The drafters that propose token ids share one compiled program a gamma: which of them
it is lies in their parameters. Each function here gives a ``BoundDrafter``, a drafter
with the parameters that go with it::

    right = planted.right(4, 256, [prompt + continuation])
    generate(model, prompt, drafter=right)

The targets are wrapped ones: put them into a model with ``dataclasses.replace``.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.drafters import (
    BoundDrafter,
    DraftContext,
    Drafter,
    DrafterSpec,
    Proposal,
    check_gamma,
)
from specjax.models import Target
from specjax.typing import Array, Float, Int, Params

#: Longest text and most texts a planted drafter knows: one shape, so that knowing
#: other texts compiles nothing.
KNOWN_LENGTH, KNOWN_TEXTS = 512, 8

# A stream of the request's seed that no part of the library uses.
_STREAM = 0x706C616E

_KINDS = ("right", "wrong", "partly", "outside", "silent", "hashed", "constant")


def right(gamma: int, vocab_size: int, texts: Sequence[Sequence[int]]) -> BoundDrafter:
    """Plants a drafter that is always right.

    Args:
      gamma: draft tokens a pass.
      vocab_size: ids of the target.
      texts: whole sequences, prompt and what the target makes of it. A row whose
        text is the beginning of one gets what follows, as far as it is known; any
        other row gets no draft.

    Returns:
      The drafter.
    """
    return _planted("right", gamma, vocab_size, texts)


def wrong(gamma: int, vocab_size: int, texts: Sequence[Sequence[int]]) -> BoundDrafter:
    """Plants a drafter that is always wrong: each id is the right one plus 1.

    Args:
      gamma: draft tokens a pass.
      vocab_size: ids of the target.
      texts: as in ``right``.

    Returns:
      The drafter.
    """
    return _planted("wrong", gamma, vocab_size, texts)


def partly_right(
    gamma: int, vocab_size: int, texts: Sequence[Sequence[int]]
) -> BoundDrafter:
    """Plants a drafter whose first k ids are right and the others wrong.

    k is in [0, gamma], from a hash of the history: a random accept pattern that every
    batch repeats.

    Args:
      gamma: draft tokens a pass.
      vocab_size: ids of the target.
      texts: as in ``right``.

    Returns:
      The drafter.
    """
    return _planted("partly", gamma, vocab_size, texts)


def outside_vocabulary(
    gamma: int, vocab_size: int, texts: Sequence[Sequence[int]] = ()
) -> BoundDrafter:
    """Plants a drafter that proposes the ids ``vocab_size`` and -1, by turns.

    Where the text is known, the first k ids are right, as in ``partly_right``.

    Args:
      gamma: draft tokens a pass.
      vocab_size: ids of the target.
      texts: as in ``right``.

    Returns:
      The drafter.
    """
    return _planted("outside", gamma, vocab_size, texts)


def silent(
    gamma: int, vocab_size: int, texts: Sequence[Sequence[int]] = ()
) -> BoundDrafter:
    """Plants a drafter of ``n_valid`` 0 whose tokens, which must not count, are right.

    Args:
      gamma: draft tokens a pass.
      vocab_size: ids of the target.
      texts: as in ``right``.

    Returns:
      The drafter.
    """
    return _planted("silent", gamma, vocab_size, texts)


def hashed(
    gamma: int, vocab_size: int, texts: Sequence[Sequence[int]] = ()
) -> BoundDrafter:
    """Plants a drafter of random length and tokens, from a hash of the history.

    Where the text is known, about three of four tokens are the right ones.

    Args:
      gamma: draft tokens a pass.
      vocab_size: ids of the target.
      texts: as in ``right``.

    Returns:
      The drafter.
    """
    return _planted("hashed", gamma, vocab_size, texts)


def constant(gamma: int, vocab_size: int, ids: Sequence[int]) -> BoundDrafter:
    """Plants a drafter that proposes the same ids in every pass.

    Args:
      gamma: draft tokens a pass.
      vocab_size: ids of the target.
      ids: gamma ids, inside the vocabulary or not.

    Returns:
      The drafter.
    """
    return _planted("constant", gamma, vocab_size, (), ids)


def sampled(gamma: int, logprobs: Float[Array, "V V"]) -> BoundDrafter:
    """Plants a drafter that draws each token from a table row and says so honestly.

    The law of a token depends on the token before it. The noise comes from the
    request's seed and the length, in a stream of its own, so it is independent of the
    rule's. Entries of -inf are never drawn; no entry of the proposal is NaN.

    Args:
      gamma: draft tokens a pass.
      logprobs: normalised natural-log law of the next token for each token.

    Returns:
      The drafter.
    """
    table = jnp.asarray(logprobs, jnp.float32)
    return BoundDrafter(_sampled(gamma, table.shape[0]), {"table": table})


def remembering(
    gamma: int, vocab_size: int, texts: Sequence[Sequence[int]]
) -> BoundDrafter:
    """Plants a drafter that is right as long as its own memory of the text is.

    It never looks at the history but at the pending token: it remembers what
    ``prefill`` and ``commit`` told it, as a model with a cache would. A chunk that is
    lost, sent twice or counted wrongly shows as a draft that is missing.

    Args:
      gamma: draft tokens a pass.
      vocab_size: ids of the target.
      texts: as in ``right``.

    Returns:
      The drafter.
    """
    return BoundDrafter(_remembering(gamma), _params("right", gamma, texts, ()))


def _planted(
    kind: str,
    gamma: int,
    vocab_size: int,
    texts: Sequence[Sequence[int]],
    ids: Sequence[int] = (),
) -> BoundDrafter:
    return BoundDrafter(_by_params(gamma, vocab_size), _params(kind, gamma, texts, ids))


def _params(
    kind: str, gamma: int, texts: Sequence[Sequence[int]], ids: Sequence[int]
) -> Params:
    """Packs what a planted drafter knows into arrays of one shape."""
    if kind == "constant" and len(ids) != gamma:
        raise ValueError(f"{gamma=} needs as many ids, got {ids}.")
    return known_texts(texts) | {
        "kind": jnp.int32(_KINDS.index(kind)),
        "ids": jnp.asarray(ids if len(ids) else [0] * gamma, jnp.int32),
    }


def known_texts(texts: Sequence[Sequence[int]]) -> Params:
    """Packs texts into an array of one shape.

    Raises:
      ValueError: there are too many, or one is too long.
    """
    if len(texts) > KNOWN_TEXTS or any(len(t) > KNOWN_LENGTH for t in texts):
        raise ValueError(
            f"A planted drafter knows {KNOWN_TEXTS} texts of {KNOWN_LENGTH} ids; got "
            f"{[len(t) for t in texts]}."
        )
    known = np.full((KNOWN_TEXTS, KNOWN_LENGTH), -1, np.int32)
    for row, text in zip(known, texts, strict=False):
        row[: len(text)] = text
    return {"texts": jnp.asarray(known)}


@functools.cache
def _by_params(gamma: int, vocab_size: int) -> Drafter:
    """The drafter behind all that propose ids; ``params["kind"]`` says which it is."""
    check_gamma(gamma)

    def propose(
        params: Params, state: tuple[()], context: DraftContext
    ) -> tuple[Proposal, tuple[()]]:
        known, n_known = follow(params["texts"], context.history, context.length, gamma)
        bits = history_hash(context)
        position = jnp.arange(gamma)[None, :]
        one_off = (known + 1) % vocab_size
        k = (bits % jnp.uint32(gamma + 1)).astype(jnp.int32)[:, None]
        turns = (position + context.length[:, None]) % 2 == 0
        foreign = jnp.where(turns, vocab_size, -1)
        noise = scramble(bits[:, None] + position.astype(jnp.uint32))
        random = (noise % jnp.uint32(vocab_size)).astype(jnp.int32)
        mostly = (noise >> 16) % jnp.uint32(4) != 0
        everything = jnp.full_like(n_known, gamma)
        choices = {
            "right": (known, n_known),
            "wrong": (one_off, n_known),
            "partly": (jnp.where(position < k, known, one_off), n_known),
            "outside": (
                jnp.where(position < jnp.minimum(k, n_known[:, None]), known, foreign),
                everything,
            ),
            "silent": (known, jnp.zeros_like(n_known)),
            "hashed": (
                jnp.where(mostly & (position < n_known[:, None]), known, random),
                (scramble(bits) % jnp.uint32(gamma + 1)).astype(jnp.int32),
            ),
            "constant": (
                jnp.broadcast_to(params["ids"][None, :], known.shape),
                everything,
            ),
        }
        tokens = jnp.stack([choices[kind][0] for kind in _KINDS])[params["kind"]]
        n_valid = jnp.stack([choices[kind][1] for kind in _KINDS])[params["kind"]]
        return Proposal(tokens=tokens, logprobs=None, n_valid=n_valid), state

    return _with_params(DrafterSpec(name="planted", gamma=gamma), propose)


@functools.cache
def _sampled(gamma: int, vocab_size: int) -> Drafter:
    check_gamma(gamma)

    def propose(
        params: Params, state: tuple[()], context: DraftContext
    ) -> tuple[Proposal, tuple[()]]:
        def row(history: Array, length: Array, seed: Array) -> tuple[Array, Array]:
            key = jax.random.fold_in(jax.random.key(seed), _STREAM)
            keys = jax.random.split(jax.random.fold_in(key, length), gamma)

            def one(token: Array, key: Array) -> tuple[Array, tuple[Array, Array]]:
                law = params["table"][token]
                token = jax.random.categorical(key, law).astype(jnp.int32)
                return token, (token, law)

            pending = history[jnp.maximum(length - 1, 0)]
            _, drafts = jax.lax.scan(one, pending, keys)
            return drafts

        seed = context.settings.seed
        tokens, laws = jax.vmap(row)(context.history, context.length, seed)
        n_valid = jnp.full_like(context.length, gamma)
        return Proposal(tokens=tokens, logprobs=laws, n_valid=n_valid), state

    return _with_params(DrafterSpec(name="planted_sampled", gamma=gamma), propose)


class _Memory(NamedTuple):
    """What a remembering drafter was told: each row's text but the pending token."""

    text: Int[Array, "B L"]
    length: Int[Array, " B"]


@functools.cache
def _remembering(gamma: int) -> Drafter:
    check_gamma(gamma)

    def init(batch: int, capacity: int) -> _Memory:
        # Room for the padding of a prefill chunk.
        size = capacity + 256
        zeros = functools.partial(jnp.zeros, dtype=jnp.int32)
        return _Memory(zeros((batch, size)), zeros((batch,)))

    def prefill(params, state, row, tokens, n_real, features) -> _Memory:
        text, length = state
        text = jax.lax.dynamic_update_slice(text, tokens, (row, length[row]))
        return _Memory(text, length.at[row].add(n_real))

    def reset_row(state: _Memory, row: Array) -> _Memory:
        text, length = state
        return _Memory(text.at[row].set(0), length.at[row].set(0))

    def propose(params, state, context: DraftContext) -> tuple[Proposal, _Memory]:
        text, length = state
        at = jnp.maximum(context.length - 1, 0)[:, None]
        pending = jnp.take_along_axis(context.history, at, axis=1)[:, 0]
        text = text.at[jnp.arange(text.shape[0]), length].set(pending)
        tokens, n_valid = follow(params["texts"], text, length + 1, gamma)
        return Proposal(tokens=tokens, logprobs=None, n_valid=n_valid), state

    def commit(params, state, context: DraftContext) -> _Memory:
        text, length = state
        # The pass's tokens but the pending one, which the next pass shows: n_new of
        # them, from the one that was pending when it began.
        size = text.shape[1]
        index = jnp.arange(context.history.shape[1])[None, :]
        first = (context.length - 1 - context.n_new)[:, None]
        fresh = (index >= first) & (index < context.length[:, None] - 1)
        at = jnp.where(fresh, length[:, None] + index - first, size)
        rows = jnp.arange(text.shape[0])[:, None]
        text = text.at[rows, at].set(context.history, mode="drop")
        return _Memory(text, length + context.n_new)

    spec = DrafterSpec(name="planted_remembering", gamma=gamma)
    return Drafter(spec, init, prefill, reset_row, propose, commit)


def _with_params(spec: DrafterSpec, propose) -> Drafter:
    """Makes a drafter without state of (params, state, context) -> proposal, state."""
    return Drafter(
        spec=spec,
        init=lambda batch, capacity: (),
        prefill=lambda params, state, row, tokens, n_real, features: state,
        reset_row=lambda state, row: state,
        propose=propose,
        commit=lambda params, state, context: state,
    )


def follow(
    texts: Int[Array, "N L"],
    history: Int[Array, "B S"],
    length: Int[Array, " B"],
    gamma: int,
) -> tuple[Int[Array, "B G"], Int[Array, " B"]]:
    """Finds what follows each row's text in the known ones.

    Returns:
      The next gamma ids (0 where unknown), and how many of them are known.
    """
    n_texts, size = texts.shape
    history = jnp.pad(history, ((0, 0), (0, max(0, size - history.shape[1]))))[:, :size]

    def row(history: Array, length: Array) -> tuple[Array, Array]:
        past = jnp.arange(size) >= length
        begins = jnp.all((texts == history[None, :]) | past[None, :], axis=1)
        begins &= length <= size
        index = length + jnp.arange(gamma)
        at = jnp.minimum(index, size - 1)
        ahead = jnp.where((index < size)[None, :], texts[:, at], -1)
        n_ahead = jnp.sum(jnp.cumprod((ahead >= 0).astype(jnp.int32), axis=1), axis=1)
        best = jnp.argmax(jnp.where(begins, n_ahead, -1))
        n = jnp.where(begins[best], n_ahead[best], 0)
        return jnp.where(jnp.arange(gamma) < n, ahead[best], 0), n

    return jax.vmap(row)(history, length)


def scramble(x: Array) -> Array:
    """Mixes the bits of uint32 values (the finaliser of MurmurHash3)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def history_hash(context: DraftContext) -> Array:
    """Hashes each row's text up to its length to uint32 [B]."""
    index = jnp.arange(context.history.shape[1], dtype=jnp.uint32)[None, :]
    inside = jnp.arange(context.history.shape[1])[None, :] < context.length[:, None]
    mixed = scramble(
        context.history.astype(jnp.uint32) * jnp.uint32(0x9E3779B1) + index
    )
    total = jnp.sum(jnp.where(inside, mixed, jnp.uint32(0)), axis=1, dtype=jnp.uint32)
    return scramble(total)


@functools.cache
def nan_target(
    target: Target, *, positions: tuple[int, ...] = (), tokens: tuple[int, ...] = ()
) -> Target:
    """Plants NaN logits.

    Args:
      target: the target to wrap; its cache must have a ``length``.
      positions: absolute positions whose prediction is NaN, in every row that gets
        there.
      tokens: ids after which the prediction is NaN, wherever they stand.

    Returns:
      The target. Its keys and values are the sound ones.
    """

    def spoil(logits: Array, ids: Array, predicted: Array) -> Array:
        bad = jnp.zeros(ids.shape, bool)
        for position in positions:
            bad |= predicted == position
        for token in tokens:
            bad |= ids == token
        return jnp.where(bad[..., None], jnp.nan, logits)

    return _wrap(target, spoil)


@functools.cache
def tie_target(target: Target, ids: tuple[int, ...]) -> Target:
    """Plants a tie: the given ids share the largest logit, everywhere.

    Args:
      target: the target to wrap; its cache must have a ``length``.
      ids: the ids that tie.

    Returns:
      The target.
    """

    def tie(logits: Array, tokens: Array, predicted: Array) -> Array:
        top = jnp.max(logits, axis=-1) + 1.0
        for token in ids:
            logits = logits.at[..., token].set(top)
        return logits

    return _wrap(target, tie)


def _wrap(target: Target, change) -> Target:
    """Wraps a target: ``change`` is (logits, ids, predicted positions) -> logits."""

    def forward(params, tokens, cache, *, row=None, with_logits=True, layout=None):
        more = {} if layout is None else {"layout": layout}
        logits, features, after = target.forward(
            params, tokens, cache, row=row, with_logits=with_logits, **more
        )
        if logits is not None:
            length = cache.length if row is None else cache.length[row][None]
            offsets = jnp.arange(tokens.shape[1]) if layout is None else layout.offsets
            offsets = jnp.broadcast_to(offsets, tokens.shape)
            predicted = length[:, None] + offsets + 1
            logits = change(logits, tokens, predicted)
        return logits, features, after

    # Its halves would go round the change.
    return target._replace(forward=forward, halves=None)
