"""Replays of reports: greedy equality, ties, numerics."""

import dataclasses
import json
import os
import subprocess
import sys
import textwrap

import chains
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decode_helpers import GAMMA, MODEL, PLAIN, assert_same, logits_of, run
from jax.sharding import AbstractMesh, AxisType

from specjax.decode import Origin, Request
from specjax.drafters import BoundDrafter, prompt_lookup
from specjax.models import DecoderConfig
from specjax.ops.platform import row_invariant
from specjax.sharding import param_shardings
from specjax.testing import planted, tiny_model

# One worker: the tests share compiled programs.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("cases_greedy")]

LOOKUP = BoundDrafter(prompt_lookup(GAMMA), None)
#: Best two logits of the tiny bfloat16 model this close may swap without exact mode:
#: it rounds to 8 bits, and its logits are of size 1 to 4.
BFLOAT16_TIE = 0.1


def _one_word():
    return Request(prompt_ids=(72,) * 48, max_new_tokens=32)


def test_one_word_48_times_on_and_off():
    """vLLM #41758: one word 48 times, 32 new tokens, lookup on and off."""
    off, on = (run([_one_word()], draft=draft) for draft in (PLAIN, LOOKUP))
    assert_same(on, off)
    assert Origin.ACCEPTED in on[0].origins
    assert set(off[0].origins) == {Origin.PLAIN}


def test_one_word_48_times_in_bfloat16():
    """vLLM #41758: as above, not exact: only near ties may go another way."""
    model = tiny_model(dtype="bfloat16")
    (on,) = run([_one_word()], model=model, draft=LOOKUP, exact=False)
    assert Origin.ACCEPTED in on.origins
    logits = logits_of(model, (*on.prompt_ids, *on.ids))[len(on.prompt_ids) - 1 : -1]
    chosen = logits[np.arange(32), list(on.ids)]
    assert np.max(logits.max(axis=1) - chosen) < BFLOAT16_TIE


def test_a_prefix_scored_as_1_2_4_and_8_rows():
    """vLLM #54506: one prefix in passes of 1, 2, 4, 8 rows; logits compared."""
    tokens = np.random.default_rng(0).integers(0, 256, (1, 8)).astype(np.int32)

    def score(width, exact):
        @jax.jit
        def forward(params, block, cache):
            with row_invariant(exact):
                logits, _, cache = MODEL.target.forward(params, block, cache)
            return logits, MODEL.target.commit(cache, jnp.full((1,), width, jnp.int32))

        cache, rows = MODEL.target.init_cache(1, 40), []
        for at in range(0, 8, width):
            logits, cache = forward(MODEL.params, tokens[:, at : at + width], cache)
            rows.append(np.asarray(logits[0]))
        return np.concatenate(rows)

    exact = [score(width, True) for width in (1, 2, 4, 8)]
    free = [score(width, False) for width in (1, 8)]
    for other in exact[1:]:
        np.testing.assert_array_equal(other, exact[0])
    # Without exact mode: float32 sums of 64 terms of size 1, in another order.
    for other in free:
        np.testing.assert_allclose(other, exact[0], atol=1e-5)


def test_of_two_equal_maxima_the_lowest_id_everywhere():
    """lattice #280: two equal maxima; drafts, choices, filters, reported tops."""
    model = chains.model((5, 17, 17), (17, 5), (5, 90), (17, 90), (90, 17), (90, 90))
    table = np.array(model.params["logits"])
    table[:, [17, 90]] = table.max(axis=1, keepdims=True) + 1
    model = dataclasses.replace(model, params={"logits": jnp.asarray(table)})
    base = Request(prompt_ids=(5,), max_new_tokens=6, top_logprobs=2)
    requests = [
        base,
        dataclasses.replace(base, temperature=1.0, top_k=1),
        dataclasses.replace(base, temperature=1.0, top_p=1e-6),
    ]
    for drafts in ((17, 17, 17, 17), (90, 90, 90, 90), (17, 90, 17, 90)):
        draft = planted.constant(4, chains.VOCAB, drafts)
        for done in chains.decode(model, requests, draft):
            assert done.ids == (17,) * 6
            for (first, a), (second, b) in done.top_logprobs:
                assert (first, second) == (17, 90) and a == b


def test_temperatures_in_one_batch_equal_each_alone():
    """tpu-inference #2860: T = 0, 0.8, 1 and an empty slot in one batch."""
    model = chains.model(scale=2.0)
    requests = [
        Request(prompt_ids=(9, i), max_new_tokens=20, temperature=t, seed=i)
        for i, t in enumerate((0.0, 0.8, 1.0))
    ]
    solo = [chains.decode(model, [r])[0] for r in requests]
    assert solo[0].ids == chains.plain(model, requests[0])[0]
    known = [(*c.prompt_ids, *c.ids) for c in solo]
    for draft in (None, planted.partly_right(4, chains.VOCAB, known)):
        assert_same(chains.decode(model, requests, draft), solo)


# Eight forced devices live in a process of their own.
_DEVICES = """
    import json
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import NamedSharding, PartitionSpec as P
    from specjax import verify
    from specjax.drafters import Proposal
    from specjax.ops.vocab import argmax
    from specjax.sampling import Settings, gumbel_noise, warp
    from specjax.sharding import make_mesh

    assert jax.device_count() == 8
    found = {}

    # Rows over two data shards: T = 0, 0.8, 1, and padding.
    mesh = make_mesh(data=2, model=4)
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(4, 3, 96)).astype(np.float32)
    logits[3] = np.nan
    tokens = np.argmax(logits, -1)[:, :2].astype(np.int32)
    settings = Settings(
        temperature=np.float32([0, 0.8, 1, -1]),
        top_k=np.int32([0, 0, 20, 0]),
        top_p=np.float32([1, 0.9, 1, 1]),
        min_p=np.float32([0, 0, 0, 0]),
        seed=np.uint32([1, 2, 3, 0]),
    )
    n_valid = np.int32([2, 2, 2, 0])

    @jax.jit
    def judge(logits, settings, tokens, n_valid):
        at = jnp.broadcast_to(jnp.arange(7, 10)[None], (len(logits), 3))
        noise = gumbel_noise(settings.seed, at, logits.shape[-1])
        scores = warp(logits, settings)
        verdict = verify.coupled.verify(Proposal(tokens, None, n_valid), scores, noise)
        return verdict.n_accepted, verdict.next_token

    args = (logits, settings, tokens, n_valid)
    rows = jax.device_put(args, NamedSharding(mesh, P("data")))
    batch = np.stack(judge(*rows))
    solo = [np.stack(judge(*jax.tree.map(lambda x: x[r:r+1], args))) for r in range(3)]
    found["batch"] = batch[:, :3].tolist()
    found["solo"] = np.concatenate(solo, axis=1).tolist()

    # A vocabulary over eight shards, its maxima tied across them.
    mesh = make_mesh(model=8)
    scores = np.round(rng.normal(size=(6, 1024)), 1).astype(np.float32)
    scores[1, [130, 700, 1023]] = 9
    scores[2, [127, 128]] = 9
    scores[3] = 0
    split = jax.device_put(scores, NamedSharding(mesh, P(None, "model")))
    best = jax.jit(lambda x: (argmax(x), jax.lax.top_k(x, 3)[1][:, 0]))
    found["split"] = [x.tolist() for x in best(split)]
    found["whole"] = [x.tolist() for x in best(scores)]
    print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def on_eight_devices():
    flags = os.environ.get("XLA_FLAGS", "")
    env = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count=8".strip(),
    }
    env.pop("JAX_NUM_CPU_DEVICES", None)
    out = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(_DEVICES)],
        capture_output=True,
        text=True,
        env=env,
        timeout=300,
    )
    assert out.returncode == 0, out.stderr[-4000:]
    return json.loads(out.stdout)


def test_temperatures_over_two_data_shards_equal_each_alone(on_eight_devices):
    """tpu-inference #2860: the same rows and padding, over two data shards."""
    assert on_eight_devices["batch"] == on_eight_devices["solo"]
    assert on_eight_devices["batch"][0][0] == 2


def test_argmax_over_a_split_vocabulary(on_eight_devices):
    """sglang-jax #1527: a vocabulary on 8 devices, ties across shards."""
    assert on_eight_devices["split"] == on_eight_devices["whole"]
    ours, top = on_eight_devices["split"]
    assert ours == top and ours[1:4] == [130, 127, 0]


def test_1001_ids_over_two_shards_are_refused():
    """TensorRT-LLM #18836: a vocabulary of 1001 over 2 shards."""
    config = DecoderConfig(
        vocab_size=1001, width=32, n_layers=1, n_heads=2, n_kv_heads=2, head_width=16,
        ff_width=64,
    )  # fmt: skip
    auto = (AxisType.Auto,) * 2
    mesh = AbstractMesh((1, 2), ("data", "model"), axis_types=auto)
    with pytest.raises(ValueError, match="vocab_size=1001.*2 devices"):
        param_shardings(config, mesh)
