"""Logical axes to mesh axes; placement on eight forced CPU devices."""

import dataclasses
import os
import pathlib
import subprocess
import sys
import textwrap

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from specjax.models import DecoderConfig, Quantization
from specjax.sharding import (
    DEFAULT_RULES,
    logical_to_mesh,
    make_mesh,
    param_shardings,
)

GOLDEN = pathlib.Path(__file__).parent.parent / "golden" / "models"
CONFIG = DecoderConfig(
    vocab_size=96,
    width=32,
    n_layers=1,
    n_heads=8,
    n_kv_heads=2,
    head_width=8,
    ff_width=64,
    qkv_bias=True,
    qk_norm=True,
)


def _mesh(model, data=1):
    auto = (AxisType.Auto,) * 2
    return AbstractMesh((data, model), ("data", "model"), axis_types=auto)


def _specs(config, mesh, rules=DEFAULT_RULES):
    return jax.tree.map(lambda s: s.spec, param_shardings(config, mesh, rules))


def test_logical_to_mesh():
    assert logical_to_mesh(("embed", "heads"), DEFAULT_RULES) == PartitionSpec(
        None, "model"
    )
    assert logical_to_mesh(("batch", None), DEFAULT_RULES) == PartitionSpec(
        "data", None
    )
    assert logical_to_mesh((), DEFAULT_RULES) == PartitionSpec()


def test_rules_that_clash_or_lack_an_axis():
    with pytest.raises(ValueError, match="'heads' and 'kv'.*'model'"):
        logical_to_mesh(("heads", "embed", "kv"), DEFAULT_RULES)
    with pytest.raises(ValueError, match="'experts' has no rule"):
        logical_to_mesh(("experts",), DEFAULT_RULES)
    clash = {**DEFAULT_RULES, "embed": "model"}
    with pytest.raises(ValueError, match="both map to the mesh axis 'model'"):
        param_shardings(CONFIG, _mesh(2), clash)


@pytest.mark.parametrize("layout", ["in_out", "out_in"])
def test_specs_by_layout(layout):
    config = dataclasses.replace(CONFIG, kernel_layout=layout)
    specs = _specs(config, _mesh(2))
    block = specs["blocks"]["0"]
    column, row = PartitionSpec(None, "model"), PartitionSpec("model", None)
    if layout == "out_in":
        column, row = row, column
    for name in ("q", "k", "v"):
        assert block["attention"][name]["kernel"] == column
        assert block["attention"][name]["bias"] == PartitionSpec("model")
    assert block["attention"]["o"]["kernel"] == row
    assert block["attention"]["q_norm"]["scale"] == PartitionSpec(None)
    assert block["ff"]["up"]["kernel"] == block["ff"]["gate"]["kernel"] == column
    assert block["ff"]["down"]["kernel"] == row
    assert specs["embedding"] == PartitionSpec("model", None)
    assert specs["head"]["kernel"] == column
    assert specs["final_norm"]["scale"] == PartitionSpec(None)


def test_few_kv_heads_are_replicated_and_never_cut():
    """2 heads of width 8 are 16 columns, which 4 devices would divide."""
    block = _specs(CONFIG, _mesh(4))["blocks"]["0"]["attention"]
    assert block["k"]["kernel"] == block["v"]["kernel"] == PartitionSpec(None, None)
    assert block["k"]["bias"] == PartitionSpec(None)
    assert block["q"]["kernel"] == PartitionSpec(None, "model")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_heads": 6, "n_kv_heads": 2}, "n_heads=6.*4 devices"),
        ({"vocab_size": 95}, "vocab_size=95"),
        ({"ff_width": 66}, "ff_width=66"),
    ],
)
def test_sizes_that_do_not_divide(changes, message):
    with pytest.raises(ValueError, match=message):
        param_shardings(dataclasses.replace(CONFIG, **changes), _mesh(4))


def test_an_axis_the_mesh_lacks():
    mesh = AbstractMesh((2,), ("tensor",), axis_types=(AxisType.Auto,))
    with pytest.raises(ValueError, match="names an axis the mesh lacks.*tensor"):
        param_shardings(CONFIG, mesh)
    rules = {k: "tensor" if v == "model" else None for k, v in DEFAULT_RULES.items()}
    assert _specs(CONFIG, mesh, rules)["embedding"] == PartitionSpec("tensor", None)


def test_explicit_axes_are_refused():
    mesh = jax.make_mesh((1,), ("model",), axis_types=(AxisType.Explicit,))
    with pytest.raises(ValueError, match="make_mesh"):
        param_shardings(CONFIG, mesh)


def test_make_mesh_needs_all_devices():
    with pytest.raises(ValueError, match="data=3 x model=7 needs 21 devices"):
        make_mesh(model=7, data=3)
    mesh = make_mesh(data=jax.device_count())
    assert mesh.axis_names == ("data", "model")
    assert jax.tree.leaves(param_shardings(CONFIG, mesh))


_PLACED = """
    import sys
    import jax, jax.numpy as jnp, numpy as np
    from specjax.sharding import DEFAULT_RULES, make_mesh, param_shardings
    from specjax.weights import load_hf, load_orbax, save_orbax

    golden, scratch = sys.argv[1:]
    assert jax.device_count() == 8
    mesh = make_mesh(model=4, data=2)
    # vocabulary 89: the rules must leave it whole
    rules = {**DEFAULT_RULES, "vocab": None}

    def check(model, plain):
        want = param_shardings(model.config, mesh, rules)
        assert jax.tree.map(lambda x: x.sharding, model.params) == want
        jax.tree.map(
            lambda x, y: np.testing.assert_array_equal(
                np.asarray(x, np.float32), np.asarray(y, np.float32)
            ),
            model.params,
            plain.params,
        )

    def logits(model):
        tokens = jnp.arange(12, dtype=jnp.int32)[None] * 5
        cache = model.target.init_cache(1, 16)
        return np.asarray(jax.jit(model.target.forward)(model.params, tokens, cache)[0])

    plain = load_hf(golden, with_tokenizer=False)
    sharded = load_hf(golden, with_tokenizer=False, mesh=mesh, rules=rules)
    check(sharded, plain)
    up = sharded.params["blocks"]["0"]["ff"]["up"]["kernel"]
    assert up.addressable_shards[0].data.size * 4 == up.size
    np.testing.assert_allclose(logits(sharded), logits(plain), rtol=0, atol=1e-5)

    save_orbax(scratch + "/from_sharded", sharded)
    check(load_orbax(scratch + "/from_sharded", mesh=mesh, rules=rules), plain)
    alone = load_orbax(scratch + "/from_sharded")
    assert len(alone.params["embedding"].sharding.device_set) == 1
    save_orbax(scratch + "/from_one", alone)
    restored = load_orbax(
        scratch + "/from_one", dtype="bfloat16", mesh=mesh, rules=rules
    )
    check(restored, load_hf(golden, with_tokenizer=False, dtype="bfloat16"))
    print("placed")
"""


def test_placement_on_eight_devices(tmp_path):
    """Loading and restoring with a mesh: shardings, values and logits."""
    flags = os.environ.get("XLA_FLAGS", "")
    env = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count=8".strip(),
    }
    env.pop("JAX_NUM_CPU_DEVICES", None)
    out = subprocess.run(
        [
            *(sys.executable, "-W", "error", "-c", textwrap.dedent(_PLACED)),
            *(str(GOLDEN / "llama_bias"), str(tmp_path)),
        ],
        capture_output=True,
        text=True,
        env=env,
        timeout=300,
    )
    assert out.returncode == 0, out.stderr[-4000:]
    assert out.stdout.strip() == "placed"
    assert np.all([(tmp_path / n).is_dir() for n in ("from_sharded", "from_one")])


def test_groups_of_quantised_weights_are_not_cut():
    """Scales are split as the kernels are, one scale a row not along the inputs."""
    config = dataclasses.replace(
        CONFIG, kernel_layout="out_in", quantization=Quantization(4, 8)
    )
    specs = _specs(config, _mesh(4))["blocks"]["0"]
    split, whole = PartitionSpec("model", None), PartitionSpec(None, None)
    inner = PartitionSpec(None, "model")
    assert specs["attention"]["q"]["kernel"] == {"values": split, "scales": split}
    assert specs["attention"]["o"]["kernel"] == {"values": inner, "scales": inner}
    assert specs["ff"]["down"]["kernel"] == {"values": inner, "scales": inner}
    rows = dataclasses.replace(config, quantization=Quantization(8))
    specs = _specs(rows, _mesh(4))["blocks"]["0"]
    assert specs["ff"]["down"]["kernel"] == {"values": inner, "scales": whole}
    # 64 inputs in groups of 32 are two parts.
    coarse = dataclasses.replace(config, quantization=Quantization(4, 32))
    with pytest.raises(ValueError, match="group=32.*64 inputs of axis 'heads' into 2"):
        _specs(coarse, _mesh(4))
