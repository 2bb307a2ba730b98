"""Targets whose next token is read from a table, so that a case is replayed by id."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
from decode_helpers import run

from specjax import cache as kv
from specjax.drafters import BoundDrafter
from specjax.models import Features, Target, TargetSpec
from specjax.ops.attention import KV_BLOCK
from specjax.sampling import ControlSpec
from specjax.testing import planted, tiny_model
from specjax.testing.reference_controls import controlled_logits
from specjax.testing.tiny import tiny_tokenizer
from specjax.text import TokenMask

VOCAB, CAPACITY, BATCH = 128, 240, 4
EOS = 127
#: Wins by this much where a chain says what follows.
STRONG = 9.0


def _forward(params, tokens, cache, *, row=None, with_logits=True):
    logits = params["logits"][tokens] if with_logits else None
    last = jnp.zeros((*tokens.shape, 1), jnp.float32)
    return logits, Features(taps=(), last=last), cache


def _init_cache(batch, capacity):
    return kv.init_cache(
        batch=batch,
        capacity=capacity,
        n_layers=0,
        n_kv_heads=1,
        head_width=1,
        dtype=jnp.dtype("float32"),
        block=KV_BLOCK,
        slack=16,
    )


TARGET = Target(
    TargetSpec(vocab_size=VOCAB, max_context=512, width=1),
    _init_cache,
    _forward,
    kv.commit,
    kv.reset_row,
    kv.copy_row,
)


@functools.cache
def _tiny():
    return tiny_model(vocab_size=VOCAB, width=16)


JSON = TokenMask.from_json_schema(
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    tiny_tokenizer(VOCAB),
    (EOS,),
)
#: One plan for all, also for those that ask nothing of their logits.
EVERYTHING = dict(
    controls=ControlSpec(penalties=True, bias=True, min_new=True),
    token_masks=(JSON,),
    n_top=2,
)
#: A smaller one, for few programs of another shape.
NOTHING = dict(controls=None, token_masks=(), n_top=0)
COUNTED = NOTHING | dict(controls=ControlSpec(penalties=True, min_new=True))


def model(*runs, logits=None, scale=0.1, eos_ids=()):
    """A model that goes on along each of some runs of ids, and at random elsewhere.

    Args:
      *runs: ids; each is followed by the next with the weight ``STRONG``.
      logits: the table itself, [V, V].
      scale: of the random logits.
      eos_ids: ids that end a text.

    Returns:
      The model; all share their compiled programs.
    """
    if logits is None:
        logits = np.random.default_rng(0).normal(size=(VOCAB, VOCAB)) * scale
    logits = np.array(logits, np.float32)
    for ids in runs:
        for a, b in zip(ids, ids[1:], strict=False):
            logits[a, b] += STRONG
    return dataclasses.replace(
        _tiny(),
        target=TARGET,
        params={"logits": jnp.asarray(logits)},
        eos_ids=tuple(eos_ids),
    )


def plain(model, request):
    """Greedy decoding in NumPy, one token at a time: ids and reason."""
    table = np.asarray(model.params["logits"])
    stops = sorted({*model.eos_ids, *request.stop_ids})
    ids = []
    while len(ids) < request.max_new_tokens:
        scores = controlled_logits(
            table[(*request.prompt_ids, *ids)[-1]],
            request.controls,
            prompt_ids=request.prompt_ids,
            output_ids=ids,
            stop_ids=stops,
        )
        ids.append(int(np.argmax(scores)))
        if ids[-1] in stops:
            return tuple(ids), "stop"
    return tuple(ids), "length"


def decode(model, requests, draft=None, **options):
    """Decodes on four slots; without a draft plainly, by the same programs."""
    draft = planted.silent(4, VOCAB) if draft is None else draft
    width = draft.drafter.spec.gamma + 1
    sizes = {"batch": BATCH, "capacity": CAPACITY, "width": width}
    return run(requests, model=model, draft=draft, **(EVERYTHING | sizes | options))


def right(gamma, *texts):
    """A drafter that knows some texts."""
    return planted.right(gamma, VOCAB, texts)


def limited(most, kind, *texts):
    """A planted drafter of ``most`` tokens a pass, 48 or fewer, by one program."""
    inner = getattr(planted, kind)(48, VOCAB, texts)
    return BoundDrafter(
        _limited(inner.drafter), {**inner.params, "most": jnp.int32(most)}
    )


@functools.cache
def _limited(inner):
    def propose(params, state, context):
        proposal, state = inner.propose(params, state, context)
        n_valid = jnp.minimum(proposal.n_valid, params["most"])
        return proposal._replace(n_valid=n_valid), state

    return inner._replace(propose=propose)
