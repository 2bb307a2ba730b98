"""How ``cached_attention`` chooses, and that a mesh splits the kernel over heads."""

import os
import pathlib
import subprocess
import sys
import textwrap

import attention_checks as checks
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from specjax.ops.attention import cached_attention, cached_attention_reference
from specjax.ops.choose import choose
from specjax.ops.platform import row_invariant, target_platform
from specjax.trees import PassLayout

ROOT = pathlib.Path(__file__).parents[2]


def attend(case, implementation=None, row=None):
    layout = None if case.mask is None else PassLayout(case.mask, case.offsets)
    return cached_attention(
        case.q,
        case.keys,
        case.values,
        jnp.asarray(case.length),
        layout=layout,
        row=row,
        key_scale=case.key_scale,
        value_scale=case.value_scale,
        implementation=implementation,
        **case.kind,
    )


def test_the_kernel_behind_the_operation():
    """Chains and trees, a row of the batch, numpy layouts and scales."""
    tree = checks.make_case([250, 3], 5, dtype="bfloat16", kv_dtype="int8")
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()):
        np.testing.assert_allclose(
            attend(tree, "pallas_tpu"), checks.exact(tree), atol=0.02
        )
        row = checks.make_case([250], 2, shape="chain", rows=[1], batch=3)
        out = attend(row, "pallas_tpu", row=jnp.asarray(1))
        np.testing.assert_allclose(out, checks.exact(row), atol=2e-5)


@pytest.mark.parametrize("kv_dtype", [None, "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("kind", [{}, {"soft_cap": 2.0}, {"window": 30, "sinks": 2}])
@pytest.mark.parametrize("invariant", [False, True])
def test_xla_and_the_reference_have_all_options(kv_dtype, kind, invariant):
    case = checks.make_case([250, 3], 5, kv_dtype=kv_dtype, group=3, **kind)

    def xla(q, keys, values, length, *, rows, mask, offsets, **named):
        layout = PassLayout(mask, offsets)
        with row_invariant(invariant):
            return cached_attention(q, keys, values, length, layout=layout, **named)

    def reference(q, keys, values, length, *, rows, mask, offsets, **named):
        layout = PassLayout(mask, offsets)
        return cached_attention_reference(
            q, keys, values, length, layout=layout, **named
        )

    checks.check(xla, case, narrow=False)
    if not invariant:
        checks.check(reference, case, narrow=False)


def test_what_is_chosen(monkeypatch):
    taken, refused = (lambda _: None), (lambda _: "no")
    assert choose(None, taken) == "xla"  # the CPU
    for platform in ("tpu", "gpu"):
        with target_platform(platform):
            assert choose(None, taken) == "xla"
            monkeypatch.setenv("SPECJAX_KERNELS", "on")
            assert choose(None, taken) == f"pallas_{platform}"
            assert choose(None, refused) == "xla"
            assert choose("xla", refused) == "xla"
            monkeypatch.setenv("SPECJAX_KERNELS", "off")
            assert choose(None, taken) == "xla"
            assert choose("pallas_tpu", taken) == "pallas_tpu"
            monkeypatch.setenv("SPECJAX_KERNELS", "on")
            assert choose(None, taken) == f"pallas_{platform}"
            monkeypatch.setenv("SPECJAX_KERNELS", "no")
            with pytest.raises(ValueError, match="SPECJAX_KERNELS='no'.*on or off"):
                choose(None, taken)
            monkeypatch.delenv("SPECJAX_KERNELS")
    with pytest.raises(ValueError, match="'pallas_tpu' can't take this: no.*xla"):
        choose("pallas_tpu", refused)
    with pytest.raises(ValueError, match="'triton' is not known"):
        choose("triton", taken)


def test_what_a_kernel_cannot_take_falls_back(monkeypatch):
    monkeypatch.setenv("SPECJAX_KERNELS", "on")
    odd = checks.make_case([3], 2, width=20)
    with target_platform("tpu"):
        assert attend(odd).shape == odd.q.shape
    with pytest.raises(ValueError, match="heads of 20.*implementation='xla'"):
        attend(odd, "pallas_tpu")
    alone = checks.make_case([3], 2, kv_dtype="int8")
    with pytest.raises(ValueError, match="alone have scales"):
        cached_attention(
            alone.q,
            alone.keys,
            alone.values,
            jnp.asarray(alone.length),
            scale=1.0,
            key_scale=alone.key_scale,
            implementation="pallas_tpu",
        )


def test_bad_arguments():
    case = checks.make_case([3], 2)
    args = (case.q, case.keys, case.values, jnp.asarray(case.length))
    with pytest.raises(ValueError, match="soft_cap=0"):
        cached_attention(*args, scale=1.0, soft_cap=0)
    with pytest.raises(ValueError, match=r"key_scale has the shape \(1, 2, 3\)"):
        cached_attention(*args, scale=1.0, key_scale=jnp.ones((1, 2, 3)))


def test_the_cpu_looks_for_no_kernel():
    code = """
        import sys
        import jax.numpy as jnp
        from specjax.ops.attention import cached_attention
        x = jnp.ones((1, 1, 256, 16))
        cached_attention(x[:, :, :1], x, x, jnp.zeros(1, jnp.int32), scale=1.0)
        bad = [m for m in sys.modules if "kernels_pallas" in m or "mosaic" in m]
        assert not [m for m in bad if "jaxlib" not in m and "jax._src" not in m], bad
    """
    _python(code)


def test_a_mesh_runs_the_kernel_on_each_device_s_heads():
    """Two devices, heads split: the definition's answer, nothing gathered.

    The interpreter's ordered callbacks cannot be partitioned, so XLA's form stands in
    for the kernel; tests/aot has the kernel itself on a slice.
    """
    code = """
        import re
        import attention_checks as checks
        import jax
        import jax.numpy as jnp
        import numpy as np
        from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
        from kernels_pallas.tree_attention import kernel_tpu
        from specjax.ops.attention import api, cached_attention
        from specjax.trees import PassLayout

        shapes = set()

        def stand_in(q, keys, values, length, *, rows=None, mask, offsets, **named):
            shapes.add((q.shape[2], keys.shape[1]))
            return cached_attention(
                q, keys, values, length, layout=PassLayout(mask, offsets),
                row=None if rows is None else rows[0], implementation="xla", **named
            )

        kernel_tpu.tree_attention = stand_in
        api._n_devices = lambda: 1  # it is refused on several TPUs
        mesh = jax.make_mesh((2,), ("model",), axis_types=(AxisType.Auto,))
        place = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
        for kv_dtype, row in (("int8", None), (None, 1)):
            rows = None if row is None else [row]
            length = [250, 3] if row is None else [250]
            case = checks.make_case(length, 3, kv_dtype=kv_dtype, rows=rows)
            cache = (None, "model")
            heads = {"q": (None, None, "model"), "keys": cache, "values": cache}
            if kv_dtype:
                heads |= {"key_scale": cache, "value_scale": cache}

            def attend(arrays):
                return cached_attention(
                    length=jnp.asarray(case.length),
                    layout=PassLayout(case.mask, case.offsets),
                    row=None if row is None else jnp.asarray(row),
                    implementation="pallas_tpu",
                    **arrays,
                    **case.kind,
                )

            with jax.set_mesh(mesh):
                split = {n: place(getattr(case, n), *heads[n]) for n in heads}
                run = jax.jit(attend).lower(split).compile()
                found = run(split)
            assert found.sharding.spec[2] == "model", found.sharding
            kinds = r"(?:all-|collective-|reduce-scatter)[a-z-]*[(]"
            sent = re.findall(kinds, run.as_text())
            assert not sent, sent
            np.testing.assert_allclose(found, checks.exact(case), atol=1e-4)
        assert (2, 1) in shapes, shapes
        print("done")
    """
    flags = (
        os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    )
    assert "done" in _python(code, XLA_FLAGS=flags)


def _python(code, **variables):
    path = os.pathsep.join([str(ROOT), str(pathlib.Path(__file__).parent)])
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path, **variables}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    out = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)
    assert out.returncode == 0, out.stderr[-3000:]
    return out.stdout
