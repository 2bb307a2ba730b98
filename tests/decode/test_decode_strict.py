"""The loop traces without implicit promotion of ranks or dtypes."""

import jax
import pytest

from specjax import drafters, trees, verify
from specjax.decode import init_state, spec_step
from specjax.models import DecoderConfig, abstract_params, decoder_target
from specjax.sampling import ControlSpec

# One worker: the tests share compiled programs.
pytestmark = pytest.mark.xdist_group("decode_strict")

SIZES = dict(
    vocab_size=40, width=32, n_layers=2, n_heads=2, n_kv_heads=1, head_width=16
)
CONFIG = DecoderConfig(
    **SIZES,
    ff_width=64,
    qkv_bias=True,
    out_bias=True,
    ff_bias=True,
    qk_norm=True,
    windows=(8, None),
)

DRAFTERS = {
    "plain": drafters.plain(),
    "prompt_lookup": drafters.prompt_lookup(3),
    "suffix_tree": drafters.suffix(3, n_nodes=5),
    "recycling_tree": drafters.token_recycling(40, trees.k_ary(2, 2)),
}


@pytest.mark.parametrize(
    ("rule", "drafter", "dtype"),
    [
        ("greedy", "plain", "float32"),
        ("coupled", "prompt_lookup", "float32"),
        ("rejection", "prompt_lookup", "bfloat16"),
        ("coupled", "suffix_tree", "float32"),
        ("rejection", "recycling_tree", "bfloat16"),
    ],
)
def test_nothing_is_promoted_by_chance(rule, drafter, dtype):
    config = DecoderConfig(**{**CONFIG.__dict__, "dtype": dtype})
    target, drafter = decoder_target(config), DRAFTERS[drafter]

    def step(params):
        state = init_state(
            target,
            drafter,
            batch=2,
            capacity=64,
            n_stop_ids=2,
            controls=ControlSpec(),
            n_top=0,
        )
        return spec_step(
            params,
            None,
            state,
            target=target,
            drafter=drafter,
            rule=verify.by_name(rule),
            widths=(1, drafter.spec.gamma + 1) if drafter.spec.gamma else (1,),
        )[0]

    # What works on trees takes any leading axes, by promoting ranks.
    ranks = "allow" if drafter.spec.depth else "raise"
    with jax.numpy_rank_promotion(ranks), jax.numpy_dtype_promotion("strict"):
        jax.eval_shape(step, abstract_params(config))
