"""A target in int8 or int4 as its own drafter."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import drafters, models
from specjax.models import Quantization, decoder_target, quantize
from specjax.ops.linear import QuantizedKernel, dequantize_kernel
from specjax.testing import tiny_model

VOCAB, CAPACITY = 13, 112
TARGET = tiny_model(6, vocab_size=VOCAB)
TEXT = np.random.default_rng(3).integers(0, VOCAB, 100)
FORMS = [(8, None), (8, 16), (4, None), (4, 16)]
each_form = pytest.mark.parametrize(("bits", "group"), FORMS)


def _logits(target, params):
    ids = jnp.asarray(TEXT[None, :20], jnp.int32)
    return target.forward(params, ids, target.init_cache(1, CAPACITY))[0]


def _dequantized(params):
    """The same parameters with arrays in the place of quantised kernels."""
    is_kernel = lambda x: isinstance(x, dict) and "scales" in x
    back = lambda x: dequantize_kernel(QuantizedKernel(**x)) if is_kernel(x) else x
    return jax.tree.map(back, params, is_leaf=is_kernel)


def _kept(stats):
    """The part of drafts that are kept, of those whose predecessors were."""
    return sum(stats.accepted_at) / sum(stats.reached_at)


@each_form
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_form_computes_with_the_dequantised_weights(bits, group, dtype):
    model = tiny_model(6, vocab_size=VOCAB, dtype=dtype)
    how = Quantization(bits, group)
    config, params = quantize(model.config, model.params, how)
    got = _logits(decoder_target(config), params)
    plain = dataclasses.replace(config, quantization=None, dtype="float32")
    floats = jax.tree.map(lambda x: x.astype(jnp.float32), _dequantized(params))
    want = _logits(decoder_target(plain), floats)
    # A bfloat16 cache rounds keys and values.
    np.testing.assert_allclose(got, want, atol=1e-4 if dtype == "float32" else 0.1)
    # And these are the target's, up to the rounding of the weights.
    error = np.sqrt(np.mean((got - _logits(model.target, model.params)) ** 2))
    assert 1e-4 < error < (0.1 if bits == 8 else 0.8)


@each_form
def test_shapes_axes_and_bytes(bits, group):
    how = Quantization(bits, group)
    config, params = quantize(TARGET.config, TARGET.params, how)
    abstract = models.abstract_params(config)
    shape = lambda x: (x.shape, x.dtype)
    assert jax.tree.map(shape, params) == jax.tree.map(shape, abstract)
    assert jax.tree.map(shape, models.init_params(config)) == jax.tree.map(
        shape, abstract
    )
    down = models.logical_axes(config)["blocks"]["0"]["ff"]["down"]["kernel"]
    assert down["values"] == ("embed", "mlp")
    assert down["scales"] == ("embed", "mlp" if group else None)
    # The head is quantised; the embedding is the target's array, not a copy.
    assert params["embedding"] is TARGET.params["embedding"]
    assert params["head"]["kernel"]["values"].nbytes == VOCAB * 32 * bits // 8
    assert hash(config) != hash(TARGET.config)


def test_a_tied_head_becomes_one_of_its_own():
    config = dataclasses.replace(TARGET.config, tied_head=True)
    params = {k: v for k, v in TARGET.params.items() if k != "head"}
    untied = {**params, "head": {"kernel": params["embedding"].T}}
    how = Quantization(8)
    one = quantize(config, params, how)
    two = quantize(TARGET.config, untied, how)
    assert one[0] == two[0]
    jax.tree.map(np.testing.assert_array_equal, one[1], two[1])


def test_both_layouts_give_the_same_integers():
    how = Quantization(4, 16)
    turned = lambda path, x: x.T if path[-1].key == "kernel" else x
    params = jax.tree_util.tree_map_with_path(turned, TARGET.params)
    config = dataclasses.replace(TARGET.config, kernel_layout="out_in")
    one, two = (
        quantize(TARGET.config, TARGET.params, how),
        quantize(config, params, how),
    )
    assert one[0] == two[0]
    jax.tree.map(np.testing.assert_array_equal, one[1], two[1])


@pytest.mark.slow
@pytest.mark.parametrize("bits", [8, 4])
def test_drafts_in_small_integers_change_no_text(bits):
    """Under the target's noise: drawn text at a temperature and greedy text."""
    draft = drafters.quantized(TARGET, 3, bits=bits, group=16)
    assert draft.drafter.spec.name == f"int{bits}"
    make = functools.partial(
        specjax.generate,
        TARGET,
        [[1, 2, 3], [int(t) for t in TEXT[:30]]],
        max_new_tokens=24,
        exact=True,
        width=4,
        seed=5,
    )
    for temperature in (0.0, 0.9):
        plain = make(drafter=None, temperature=temperature)
        done = make(drafter=draft, temperature=temperature)
        for a, b in zip(plain, done, strict=True):
            assert a.ids == b.ids
        assert _kept(done.stats) > (0.8 if bits == 8 else 0.3)


@pytest.mark.slow
def test_int8_drafts_of_a_real_model_are_mostly_accepted():
    """Greedy, SmolLM2-135M: what a rounded copy of the target agrees with."""
    model = specjax.load("smollm2-135m-instruct", dtype="bfloat16")
    prompts = ["Why is the sky blue?", "Write a Python function that reverses a list."]
    kept = {}
    for name in ("int8", "int4:32"):
        draft = drafters.for_target(name, 4, model)
        done = specjax.generate(
            model, prompts, drafter=draft, max_new_tokens=48, temperature=0.0
        )
        kept[name] = _kept(done.stats)
    assert kept["int8"] > 0.8, kept
    assert 0.2 < kept["int4:32"] < kept["int8"], kept


def test_wrong_arguments_say_what_would_be_right():
    with pytest.raises(ValueError, match=r"group=20 does not divide width.*such as 16"):
        drafters.quantized(TARGET, group=20)
    with pytest.raises(ValueError, match="bits=2 is not supported; use one of"):
        drafters.quantized(TARGET, bits=2)
    config, params = quantize(TARGET.config, TARGET.params, Quantization(8))
    with pytest.raises(ValueError, match="quantised already"):
        quantize(config, params, Quantization(4))
    with pytest.raises(
        ValueError, match=r"kernel_layout='in_out'.*models.quantize makes"
    ):
        dataclasses.replace(TARGET.config, quantization=Quantization(8))
    with pytest.raises(ValueError, match=r"gamma=0"):
        drafters.quantized(TARGET, 0)
