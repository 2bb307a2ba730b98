"""Compiles a kernel's cases for one target in a process of its own."""

import argparse
import importlib
import json
import time
import traceback

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from specjax.ops.platform import target_platform
from specjax.testing import aot


def case_names(module, platform):
    """Returns the names of the cases that a module has for a platform."""
    return list(importlib.import_module(module).cases(platform))


def report(target, module, name):
    """Compiles one case on one device; returns what the program holds and makes."""
    device = aot.devices(target)[0]
    platform = aot.TARGETS[target].platform
    mesh = Mesh(np.asarray([device]), ("model",), axis_types=(AxisType.Auto,))
    whole = NamedSharding(mesh, PartitionSpec())
    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole)
    with target_platform(platform), jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        function, arguments = importlib.import_module(module).cases(platform)[name]
        arguments = jax.tree.map(place, arguments)
        begun = time.monotonic()
        donated = getattr(function, "donated", ())
        lowered = jax.jit(function, donate_argnums=donated).lower(*arguments)
        compiled = lowered.compile()
    memory = compiled.memory_analysis()
    text = compiled.as_text()
    largest = max(jax.tree.leaves(arguments), key=lambda x: x.size)
    return {
        "seconds": time.monotonic() - begun,
        "argument_bytes": memory.argument_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "accessed_bytes": (compiled.cost_analysis() or {}).get("bytes accessed"),
        "kernels": sum(text.count(f'custom_call_target="{x}"') for x in _CALLS),
        "copies": {
            what: n
            for what, n in aot.whole_copies(text, [largest.shape]).items()
            if what.split()[-1] not in _PASSED
        },
    }


# Of float32 arrays every operation is named: the kernel's own results, aliased, and
# what moves nothing or moves a part into fast memory.
_PASSED = ("custom-call", "bitcast", "slice-start")
_CALLS = ("tpu_custom_call", "mosaic_gpu_v2", "mosaic_gpu")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("target")
    parser.add_argument("module")
    args = parser.parse_args()
    for name in case_names(args.module, aot.TARGETS[args.target].platform):
        try:
            line = {"case": name, "report": report(args.target, args.module, name)}
        except Exception:
            line = {"case": name, "error": traceback.format_exc()}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
