"""Checkpoint metadata to configurations: every key that is read or refused."""

import json
import math
import pathlib

import pytest

from specjax.models import RopeConfig, config_from_gguf, config_from_hf

GOLDEN = pathlib.Path(__file__).parent.parent / "golden" / "models"


def _hf(**changes):
    """A Llama config; a key set to ... is left out."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 256,
        "hidden_act": "silu",
    }
    config.update(changes)
    return {key: value for key, value in config.items() if value is not ...}


def _rope(_top=None, **keys):
    return config_from_hf(_hf(rope_parameters=keys, **(_top or {}))).rope


def test_defaults_are_those_of_transformers():
    config = config_from_hf(_hf(num_key_value_heads=...))
    assert config.n_kv_heads == 4
    assert config.head_width == 16
    assert config.rope == RopeConfig(theta=10000.0)
    assert not config.tied_head and not config.qkv_bias and config.windows == ()


@pytest.mark.parametrize(
    ("dtype", "layout"), [("float32", "in_out"), ("bfloat16", "in_out")]
)
def test_dtype_and_layout_are_arguments(dtype, layout):
    config = config_from_hf(_hf(), dtype=dtype, kernel_layout=layout)
    assert (config.dtype, config.kernel_layout) == (dtype, layout)


def test_both_spellings_of_rope_agree():
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    new = _rope(rope_type="llama3", rope_theta=5e5, **scaling)
    for spelling in ("type", "rope_type"):
        old = _hf(rope_theta=5e5, rope_scaling={spelling: "llama3", **scaling})
        assert config_from_hf(old).rope == new
    assert new == RopeConfig(
        theta=5e5,
        kind="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_context=64,
    )


def test_yarn_reads_every_key_and_scales_the_context():
    keys = {
        "attention_factor": 1.25,
        "beta_fast": 24,
        "beta_slow": 2,
        "mscale": 1.1,
        "mscale_all_dim": 0.9,
        "truncate": False,
    }
    config = config_from_hf(
        _hf(
            rope_scaling={
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                **keys,
            }
        )
    )
    assert config.rope == RopeConfig(
        kind="yarn", factor=4.0, original_context=128, **keys
    )
    assert config.max_context == 512


@pytest.mark.parametrize("nested", [True, False])
def test_factor_is_the_ratio_where_it_is_missing(nested):
    original = {"original_max_position_embeddings": 64}
    lists = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    keys = {"rope_type": "longrope", **lists, **(original if nested else {})}
    rope = _rope(None if nested else original, **keys)
    assert (rope.factor, rope.original_context) == (4.0, 64)
    assert rope.long_factor == (2.0,) * 8
    assert config_from_hf(_hf(rope_parameters=keys, **original)).max_context == 256


def test_dynamic_starts_at_the_longest_position():
    rope = _rope(rope_type="dynamic", factor=2.0)
    assert (rope.kind, rope.original_context, rope.factor) == ("dynamic", 256, 2.0)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rope_type": "su", "factor": 2.0}, "'su' is not supported"),
        ({"rope_type": "linear"}, r"missing keys \['factor'\]"),
        ({"rope_type": "linear", "factor": 2.0, "beta_fast": 1}, "does not know"),
        ({"factor": 2.0}, "does not know"),
        ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor"),
        ({"rope_type": "linear", "type": "yarn", "factor": 2.0}, "differ"),
        ({"rope_type": "linear", "factor": -1.0}, "must be positive"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"full_attention": {"rope_type": "default"}}, "between layer types"),
        (
            {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 8},
            "must be 8 positive",
        ),
    ],
)
def test_bad_rope(keys, message):
    with pytest.raises(ValueError, match=message):
        _rope(**keys)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*LlamaForCausalLM"),
        ({"architectures": None}, "exactly one"),
        ({"vocab_size": ..., "rms_norm_eps": ...}, "lacks vocab_size, rms_norm_eps"),
        ({"vocab_size": "100"}, "vocab_size='100'.*must be a number"),
        ({"rms_norm_eps": None}, "rms_norm_eps=None"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor"),
        ({"rope_interleaved": True}, "rope_interleaved"),
        ({"num_attention_heads": 5}, "no multiple"),
        ({"num_key_value_heads": 3}, "no multiple"),
        ({"layer_types": ["full_attention"]}, "each of 2 layers"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "each of 2"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "contradicts"),
        (
            {"rope_scaling": {"type": "linear"}, "rope_parameters": {"type": "yarn"}},
            "differ; keep one",
        ),
        (
            {"architectures": ["MistralForCausalLM"]},
            "lacks sliding_window",
        ),
        ({"architectures": ["Qwen3ForCausalLM"]}, "lacks head_dim"),
    ],
)
def test_bad_config(changes, message):
    with pytest.raises(ValueError, match=message):
        config_from_hf(_hf(**changes))


def test_unsupported_dtype():
    with pytest.raises(ValueError, match="float16"):
        config_from_hf(_hf(), dtype="float16")


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, ()),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 7}, (7, 7)),
        ({"sliding_window": 7}, ()),
        ({"use_sliding_window": False, "sliding_window": 7}, ()),
        (
            {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
            (None, 7),
        ),
        (
            {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2},
            (),
        ),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 7,
                "max_window_layers": 2,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            (7, None),
        ),
    ],
)
def test_windows(changes, windows):
    changes = {"architectures": ["Qwen2ForCausalLM"], **changes}
    assert config_from_hf(_hf(**changes)).windows == windows


def test_windows_need_to_know_their_layers():
    config = _hf(
        architectures=["Qwen2ForCausalLM"], use_sliding_window=True, sliding_window=7
    )
    with pytest.raises(ValueError, match="max_window_layers"):
        config_from_hf(config)


def test_biases_follow_the_family():
    qwen2 = config_from_hf(_hf(architectures=["Qwen2ForCausalLM"]))
    assert (qwen2.qkv_bias, qwen2.out_bias, qwen2.ff_bias) == (True, False, False)
    llama = config_from_hf(_hf(attention_bias=True, mlp_bias=True))
    assert (llama.qkv_bias, llama.out_bias, llama.ff_bias) == (True, True, True)
    golden = json.loads((GOLDEN / "qwen3" / "config.json").read_text())
    qwen3 = config_from_hf(golden)
    assert (qwen3.qk_norm, qwen3.qkv_bias, qwen3.head_width) == (True, False, 16)


SHAPES = {"token_embd.weight": (100, 64), "output.weight": (100, 64)}


def _gguf(_shapes=None, _rope=None, **changes):
    """The configuration of a llama GGUF; ``a__b`` stands for the field ``a.b``."""
    arch = changes.pop("arch", "llama")
    fields = {
        "block_count": 2,
        "context_length": 256,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 9.999999747378752e-06,
        "rope.freq_base": 500000.0,
    }
    fields.update({key.replace("__", "."): value for key, value in changes.items()})
    fields = {
        f"{arch}.{key}": value for key, value in fields.items() if value is not ...
    }
    fields["general.architecture"] = arch
    return config_from_gguf(fields, _shapes or SHAPES, rope_tensors=_rope)


def test_gguf_sizes_and_tying():
    config = _gguf()
    assert (config.vocab_size, config.head_width, config.n_kv_heads) == (100, 16, 2)
    assert config.norm_eps == 1e-5 and config.rope == RopeConfig(theta=5e5)
    assert not config.tied_head
    tied = {"token_embd.weight": (100, 64), "blk.0.attn_q.bias": (64,)}
    assert _gguf(tied).tied_head and _gguf(tied).qkv_bias
    assert _gguf(arch="qwen3", attention__key_length=32).head_width == 32


def test_gguf_one_number_a_layer_if_all_are_alike():
    assert _gguf(attention__head_count_kv=[2, 2]).n_kv_heads == 2
    with pytest.raises(ValueError, match="differs between layers"):
        _gguf(attention__head_count_kv=[2, 4])


def test_gguf_rope():
    assert _gguf(rope__scaling__factor=4.0).rope == RopeConfig(
        theta=5e5, kind="linear", factor=4.0
    )
    none = _gguf(rope__scaling__factor=4.0, rope__scaling__type="none")
    assert none.rope == RopeConfig(theta=5e5)
    freqs = {"rope_freqs.weight": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]}
    both = _gguf(_rope=freqs, rope__scaling__factor=2.0)
    assert both.rope.kind == "factors"
    assert both.rope.factors == (2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0, 16.0)
    yarn = _gguf(
        rope__scaling__type="yarn",
        rope__scaling__factor=4.0,
        rope__scaling__original_context_length=128,
        rope__scaling__yarn_beta_fast=16.0,
        rope__scaling__attn_factor=0.5,
    )
    assert yarn.rope == RopeConfig(
        theta=5e5,
        kind="yarn",
        factor=4.0,
        original_context=128,
        beta_fast=16.0,
        attention_factor=0.5 * (0.1 * math.log(4.0) + 1.0),
    )
    assert yarn.max_context == 512
    lists = {
        "rope_factors_short.weight": [1.0] * 8,
        "rope_factors_long.weight": [2.0] * 8,
    }
    longrope = _gguf(
        _rope=lists, rope__scaling__type="longrope", rope__scaling__attn_factor=1.5
    )
    assert longrope.rope.long_factor == (2.0,) * 8
    assert longrope.rope.attention_factor == 1.5


def test_gguf_windows():
    assert _gguf(attention__sliding_window=7).windows == (7, 7)
    assert _gguf(attention__sliding_window=256).windows == ()
    pattern = {"attention__sliding_window_pattern": [False, True]}
    qwen = _gguf(arch="qwen2", attention__sliding_window=7, **pattern)
    assert qwen.windows == (None, 7)
    with pytest.raises(ValueError, match="sliding_window_pattern"):
        _gguf(arch="qwen2", attention__sliding_window=7)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arch": "gemma3"}, "'gemma3'.*llama, qwen2, qwen3"),
        ({"expert_count": 8}, "expert_count=8"),
        ({"logit_scale": 0.5}, "logit_scale"),
        ({"embedding_length": ...}, "no field llama.embedding_length"),
        ({"_shapes": {"output.weight": (100, 64)}}, "no tensor token_embd"),
        ({"attention__head_count": 6}, "no multiple of 6 heads"),
        ({"rope__dimension_count": 8}, "rope.dimension_count=8"),
        ({"attention__value_length": 8}, "value_length=8"),
        ({"rope__scaling__type": "ntk"}, "'ntk' is not supported"),
        ({"rope__scaling__type": "longrope"}, "needs the tensor rope_factors_short"),
        ({"rope__scaling__attn_factor": 2.0}, "attn_factor=2.0"),
        ({"_rope": {"rope_freqs.weight": [1.0]}}, "must be 8 positive numbers"),
        ({"_rope": {"rope_factors_long.weight": [1.0] * 8}}, "not longrope"),
    ],
)
def test_bad_gguf(changes, message):
    with pytest.raises(ValueError, match=message):
        _gguf(**changes)
