"""The Target contract, and the zoo's way of making one."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from specjax import cache as kv
from specjax.models._config import DecoderConfig
from specjax.models._decoder import (
    NO_SKIP,
    Decoder,
    Features,
    KVBudget,
    LayerSkip,
)
from specjax.ops.attention import KV_BLOCK
from specjax.typing import Params

#: Slots a cache keeps beyond its capacity: the padding of a last prefill bucket.
CACHE_SLACK = 16


@dataclasses.dataclass(frozen=True)
class TargetSpec:
    """What the rest of specjax may know about a target.

    Attributes:
      vocab_size: width of the logits.
      max_context: longest context the model is meant for, tokens.
      width: width of the features.
      taps: tapped blocks, the order of ``Features.taps``.
      cache_kind: ``kv`` for caches that roll back by their length.
      cache_shape: of a token in the cache; targets of equal kind and shape can run on
        each other's caches, whatever the types. Empty: on no other's.
    """

    vocab_size: int
    max_context: int
    width: int
    taps: tuple[int, ...] = ()
    cache_kind: str = "kv"
    cache_shape: tuple[int, ...] = ()


class Halves(NamedTuple):
    """A forward in two halves, for drafts that leave the stack early.

    Attributes:
      begin: (params, tokens [R, T], cache, *, stop) -> (hidden [R, T, D], cache). Runs
        blocks [0, stop) and writes their part of the cache at [length, length + T).
      read: (params, hidden) -> float32 logits; the final norm and the head.
      finish: (params, hidden, cache, *, start) -> (logits, Features, cache). Runs the
        blocks from start on, at the same positions, as ``Target.forward`` would have.
      n_blocks: of the whole stack.
    """

    begin: Callable[..., Any]
    read: Callable[..., Any]
    finish: Callable[..., Any]
    n_blocks: int


class Target(NamedTuple):
    """A model that scores drafts: pure functions, parameters explicit.

    Attributes:
      spec: static facts.
      init_cache: (batch, capacity) -> cache.
      forward: (params, tokens [R, T], cache, *, row=None, with_logits=True,
        layout=None) -> (float32 logits [R, T, V] or None, Features, cache). Row t of a
        pass is the token at position length + t; keys and values are written there and
        ``length`` does not move. With ``row``, R is 1 and the pass belongs to that
        batch row. With a ``trees.PassLayout`` row t stands at length + offsets[t], is
        still written at length + t, and sees the rows of the pass that the mask names.
        Token ids must be inside the vocabulary.
      commit: (cache, n [B]) -> cache; moves the lengths by n.
      reset_row: (cache, row) -> cache; empties one row.
      copy_row: (cache, source, row, length) -> cache; the row then holds the first
        ``length`` tokens of the source row, which holds at least as many; 0 empties
        it.
      halves: the forward in two halves, None where it cannot be cut.
      gather_path: (cache, path [B, D], n_nodes) -> cache; after a pass over a tree of
        so many nodes and before ``commit``: puts the nodes of each row's path where a
        chain of them would stand; None for targets that score chains only.
    """

    spec: TargetSpec
    init_cache: Callable[[int, int], Any]
    forward: Callable[..., Any]
    commit: Callable[..., Any]
    reset_row: Callable[..., Any]
    copy_row: Callable[..., Any]
    halves: Halves | None = None
    gather_path: Callable[..., Any] | None = None


@functools.cache
def decoder_target(
    config: DecoderConfig,
    taps: tuple[int, ...] = (),
    skip: LayerSkip = NO_SKIP,
    budget: KVBudget | None = None,
) -> Target:
    """Makes the Target of a decoder configuration.

    Equal arguments give the identical Target, so compiled programs are shared.

    Args:
      config: the decoder.
      taps: blocks whose outputs the features carry.
      skip: sublayers to leave out; the parameters stay those of the whole decoder.
      budget: what attention sees of the text; None is all.

    Returns:
      The target; its parameters come from ``init_params`` or ``weights``.

    Raises:
      ValueError: a tap or a skipped sublayer is no block of the model, or the budget is
        none.
    """
    skip.check(config.n_layers)
    if budget is not None:
        budget.check()
    for tap in taps:
        if not 0 <= tap < config.n_layers:
            raise ValueError(f"{tap=} is no block of {config.n_layers=}.")
    graph, abstract = nnx.split(_abstract_decoder(config))

    def merged(params: Params) -> Decoder:
        state = jax.tree.map(lambda leaf: leaf, abstract)
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(graph, state)

    def forward(params, tokens, cache, *, row=None, with_logits=True, layout=None):
        model = merged(params)
        x, tapped, cache = model.run_blocks(
            model.embed(tokens),
            cache,
            row=row,
            taps=taps,
            skip=skip,
            budget=budget,
            layout=layout,
        )
        hidden = model.final_norm(x)
        logits = model.logits(hidden) if with_logits else None
        return logits, Features(taps=tapped, last=hidden), cache

    def begin(params, tokens, cache, *, stop):
        model = merged(params)
        x, _, cache = model.run_blocks(model.embed(tokens), cache, stop=stop)
        return x, cache

    def read(params, hidden):
        model = merged(params)
        return model.logits(model.final_norm(hidden))

    def finish(params, hidden, cache, *, start):
        model = merged(params)
        x, tapped, cache = model.run_blocks(hidden, cache, start=start, taps=taps)
        hidden = model.final_norm(x)
        return model.logits(hidden), Features(taps=tapped, last=hidden), cache

    def init_cache(batch: int, capacity: int) -> kv.KVCache:
        return kv.init_cache(
            batch=batch,
            capacity=capacity,
            n_layers=config.n_layers,
            n_kv_heads=config.n_kv_heads,
            head_width=config.head_width,
            dtype=jnp.dtype(config.dtype),
            block=KV_BLOCK,
            slack=CACHE_SLACK,
        )

    spec = TargetSpec(
        vocab_size=config.vocab_size,
        max_context=config.max_context,
        width=config.width,
        taps=taps,
        cache_shape=(config.n_layers, config.n_kv_heads, config.head_width),
    )
    whole = skip == NO_SKIP and budget is None and not taps
    return Target(
        spec,
        init_cache,
        forward,
        kv.commit,
        kv.reset_row,
        kv.copy_row,
        Halves(begin, read, finish, config.n_layers) if whole else None,
        kv.gather_path,
    )


def _abstract_decoder(config: DecoderConfig) -> Decoder:
    return nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0)))


def abstract_params(config: DecoderConfig) -> Params:
    """Returns the parameter pytree as shapes and dtypes, nothing allocated."""
    return _pure(nnx.state(_abstract_decoder(config)))


def logical_axes(config: DecoderConfig) -> Params:
    """Returns, for each parameter, its tuple of logical axis names.

    The names are embed, heads, kv, head, mlp and vocab; ``sharding`` maps them to
    mesh axes.
    """
    axes = nnx.map_state(
        lambda _, v: v.get_metadata()["axes"], nnx.state(_abstract_decoder(config))
    )
    return _stringify(nnx.to_pure_dict(axes))


def init_params(config: DecoderConfig, seed: int = 0) -> Params:
    """Returns random parameters, for tests and for training from scratch.

    Args:
      config: the decoder.
      seed: of the random numbers.

    Returns:
      Nested dictionaries of arrays with string keys.
    """
    return _pure(nnx.state(Decoder(config, nnx.Rngs(seed))))


def _pure(state: nnx.State) -> Params:
    return _stringify(nnx.to_pure_dict(state))


def _stringify(tree: Any) -> Any:
    """List indices become string keys, which every checkpoint format keeps."""
    if isinstance(tree, dict):
        return {str(key): _stringify(value) for key, value in tree.items()}
    return tree
