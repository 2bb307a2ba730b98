"""Ahead-of-time compiles of the decode programs for chips that are not here.

A compile gives the real executable of a TPU slice or of NVIDIA GPUs, and with it the
facts that can be checked without the chip: that the programs compile and fit, that
the donated state is updated in place, what is held in memory besides the arguments,
and what the devices tell each other. It shows neither numerics nor speed.

The ``aot`` dependency group has the compilers. Each target wants a process of its own,
started with :func:`environment`: the compilers read it when they are loaded.

    env = {**os.environ, **environment(TARGETS["v5e:2x2"])}
    # in the process:
    for report in compile_decode(plan, devices("v5e:2x2"), config=config):
        print(report)
"""

import collections
import dataclasses
import importlib.util
import math
import os
import pathlib
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from specjax.decode._compiled import PREFILL_BUCKETS, Plan, Programs
from specjax.models import DecoderConfig, abstract_params
from specjax.ops.platform import target_platform
from specjax.sharding import DEFAULT_RULES, Rules, param_shardings

#: The mesh axis that shares out the parameters.
AXIS = "model"


@dataclasses.dataclass(frozen=True)
class Gpu:
    """What XLA's GPU compiler asks about a chip.

    Attributes:
      name: as the driver gives it.
      capability: compute capability.
      n_cores: streaming multiprocessors.
      threads_per_core: resident threads a multiprocessor.
      shared_core_bytes: shared memory of a multiprocessor.
      shared_block_bytes: most shared memory a block may opt in to.
      l2_bytes: second-level cache.
      memory_bytes: device memory.
      bandwidth: bytes a second.
      clock_ghz: boost clock.
    """

    name: str
    capability: tuple[int, int]
    n_cores: int
    threads_per_core: int
    shared_core_bytes: int
    shared_block_bytes: int
    l2_bytes: int
    memory_bytes: int
    bandwidth: int
    clock_ghz: float

    def config(self) -> str:
        """Returns the text of a ``GpuTargetConfigProto``.

        The feature extension stands for the ``a`` of sm_90a and sm_121a: without it
        the architecture's own matrix instructions are refused.
        """
        major, minor = self.capability
        return f"""
            gpu_device_info {{
              threads_per_block_limit: 1024
              threads_per_warp: 32
              shared_memory_per_block: 49152
              shared_memory_per_core: {self.shared_core_bytes}
              shared_memory_per_block_optin: {self.shared_block_bytes}
              threads_per_core_limit: {self.threads_per_core}
              core_count: {self.n_cores}
              fpus_per_core: 128
              block_dim_limit_x: 2147483647
              block_dim_limit_y: 65535
              block_dim_limit_z: 65535
              memory_bandwidth: {self.bandwidth}
              l2_cache_size: {self.l2_bytes}
              clock_rate_ghz: {self.clock_ghz}
              device_memory_size: {self.memory_bytes}
              registers_per_core_limit: 65536
              registers_per_block_limit: 65536
              cuda_compute_capability {{
                major: {major} minor: {minor}
                feature_extension: ACCELERATED_FEATURES
              }}
            }}
            runtime_version {{ major: 13 minor: 0 patch: 0 }}
            dnn_version_info {{ major: 9 minor: 12 }}
            platform_name: "CUDA"
            device_description_str: "{self.name}"
        """


# Data-sheet figures; those of the GB10 are to be checked on one.
_H200 = Gpu(
    name="NVIDIA H200",
    capability=(9, 0),
    n_cores=132,
    threads_per_core=2048,
    shared_core_bytes=233472,
    shared_block_bytes=232448,
    l2_bytes=62914560,
    memory_bytes=150121152512,
    bandwidth=4800000000000,
    clock_ghz=1.98,
)
_GB10 = Gpu(
    name="NVIDIA GB10",
    capability=(12, 1),
    n_cores=48,
    threads_per_core=1536,
    shared_core_bytes=102400,
    shared_block_bytes=101376,
    l2_bytes=25165824,
    memory_bytes=128000000000,
    bandwidth=273000000000,
    clock_ghz=2.4,
)


@dataclasses.dataclass(frozen=True)
class Chips:
    """Devices to compile for.

    Attributes:
      platform: ``tpu`` or ``gpu``.
      topology: TPU slice by its name, or GPUs as slices x hosts x GPUs of a host.
      memory_bytes: memory of one device.
      gpu: the GPU; None for TPUs.
    """

    platform: Literal["tpu", "gpu"]
    topology: str
    memory_bytes: int
    gpu: Gpu | None = None


def _gpus(gpu: Gpu, topology: str) -> Chips:
    return Chips("gpu", topology, gpu.memory_bytes, gpu)


#: Targets by name.
TARGETS: dict[str, Chips] = {
    "v5e:2x2": Chips("tpu", "v5e:2x2", 16 * 2**30),
    "v6e:2x2": Chips("tpu", "v6e:2x2", 32 * 2**30),
    "h200:1": _gpus(_H200, "1x1x1"),
    "h200:4": _gpus(_H200, "1x1x4"),
    "gb10:1": _gpus(_GB10, "1x1x1"),
    "gb10:2x1": _gpus(_GB10, "1x2x1"),  # two hosts, joined by their network
}


def environment(name: str) -> dict[str, str]:
    """Returns the environment variables a target's process must be started with.

    Args:
      name: of ``TARGETS``.

    Returns:
      Variables to lay over ``os.environ``; JAX itself runs on the CPU.

    Raises:
      ValueError: the target is not known.
      FileNotFoundError: the target is a GPU and there is no CUDA 13 compiler.
    """
    chips = _target(name)
    env = {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",  # no look-up of a cloud machine's metadata
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # else a second process aborts on a lock
    }
    if chips.platform == "gpu":
        root = cuda_root()
        flags = os.environ.get("XLA_FLAGS", "")
        env["XLA_FLAGS"] = f"{flags} --xla_gpu_cuda_data_dir={root}".strip()
        env["PATH"] = f"{root / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
    return env


def cuda_root() -> pathlib.Path:
    """Finds ptxas and libdevice: those of the environment's wheels, or a toolkit.

    Returns:
      A folder with ``bin/ptxas`` and ``nvvm/libdevice/libdevice.10.bc``.

    Raises:
      FileNotFoundError: there is none.
    """
    spec = importlib.util.find_spec("nvidia")
    wheels = spec.submodule_search_locations if spec is not None else None
    roots = [pathlib.Path(folder) / "cu13" for folder in wheels or ()]
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if variable in os.environ:
            roots.append(pathlib.Path(os.environ[variable]))
    roots.append(pathlib.Path("/usr/local/cuda"))
    for root in roots:
        needed = (root / "bin/ptxas", root / "nvvm/libdevice/libdevice.10.bc")
        if all(file.is_file() for file in needed):
            return root
    raise FileNotFoundError(
        "No folder with bin/ptxas and nvvm/libdevice/libdevice.10.bc among "
        f"{', '.join(map(str, roots))}. Install the aot group, or a CUDA 13 toolkit "
        "and set CUDA_HOME."
    )


def devices(name: str) -> list[Any]:
    """Returns the devices of a target; they compile and cannot run.

    Args:
      name: of ``TARGETS``.

    Raises:
      ValueError: the target is not known.
    """
    chips = _target(name)
    if chips.gpu is None:
        topology = topologies.get_topology_desc(
            platform="tpu", topology_name=chips.topology
        )
    else:
        topology = topologies.get_topology_desc(
            platform="cuda",
            target_config=chips.gpu.config(),
            topology=chips.topology,
        )
    return list(topology.devices)


def _target(name: str) -> Chips:
    if name not in TARGETS:
        raise ValueError(f"target {name!r} is not known; use one of {list(TARGETS)}.")
    return TARGETS[name]


class Collective(NamedTuple):
    """Collectives of one kind in a program's text, each counted once.

    Attributes:
      n: how many.
      n_bytes: of their results on one device, together.
      largest: bytes of the largest.
    """

    n: int
    n_bytes: int
    largest: int


class Report(NamedTuple):
    """What a compile told. Bytes are those of one device.

    Attributes:
      program: ``run`` or ``prefill``.
      seconds: to lower and to compile.
      n_devices: devices of the program.
      argument_bytes: of parameters, state and scalars.
      temp_bytes: of everything held besides arguments and results.
      alias_bytes: of results that take the place of arguments.
      weight_bytes: of the parameters.
      state_bytes: of the donated state.
      cache_bytes: of the keys and values in it.
      floor_bytes: what a pass must read at the least: the matrices once and the keys
        and values of full slots once. Rows looked up in an embedding count as none.
      flops: by the backend's own count, a loop's body once; None where it has none.
      accessed_bytes: likewise.
      collectives: kind -> those of the whole program.
      block_collectives: kind -> those inside the decoder's blocks.
      copies: ``dtype[shape] operation`` -> arrays of the size of a parameter matrix
        or of a layer's keys or values that are made anew, per call or per pass.
      n_aliased: leaves of the results that take an argument's place.
      n_state: leaves of the state.
      moved: leaves of the state that come out sharded otherwise than they went in;
        the next call would compile again.
    """

    program: str
    seconds: float
    n_devices: int
    argument_bytes: int
    temp_bytes: int
    alias_bytes: int
    weight_bytes: int
    state_bytes: int
    cache_bytes: int
    floor_bytes: int
    flops: float | None
    accessed_bytes: float | None
    collectives: dict[str, Collective]
    block_collectives: dict[str, Collective]
    copies: dict[str, int]
    n_aliased: int
    n_state: int
    moved: tuple[str, ...]


def compile_decode(
    plan: Plan,
    chips: Sequence[Any],
    *,
    config: DecoderConfig,
    draft: DecoderConfig | None = None,
    rules: Rules = DEFAULT_RULES,
    n_passes: int = 16,
    prefill_size: int | None = PREFILL_BUCKETS[0],
    text_dir: pathlib.Path | None = None,
) -> list[Report]:
    """Compiles a plan's decode loop, and one prefill chunk, for other devices.

    Parameters are sharded by ``sharding.param_shardings``, keys and values over their
    heads where the devices divide them, the rest of the state is replicated.

    Args:
      plan: the decode loop.
      chips: from :func:`devices`.
      config: the decoder that ``plan.target`` was made of.
      draft: the decoder whose parameters the drafter has; None: it has none.
      rules: logical axis -> ``AXIS`` or None.
      n_passes: passes a call of the loop makes.
      prefill_size: tokens of the chunk; None compiles no prefill.
      text_dir: where to leave the compiled programs' text.

    Returns:
      A report for each program, that of the loop first.

    Raises:
      ValueError: the parameters cannot be shared out by the rules.
    """
    auto = (AxisType.Auto,)
    mesh = Mesh(np.asarray(chips), (AXIS,), axis_types=auto)
    platform = "tpu" if chips[0].platform == "tpu" else "gpu"
    placed = lambda c: _place(abstract_params(c), param_shardings(c, mesh, rules))
    params, own = placed(config), None if draft is None else placed(draft)
    scalar = _place(jax.ShapeDtypeStruct((), jnp.int32), NamedSharding(mesh, _WHOLE))
    with target_platform(platform), jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        # Not the cached ``programs``: those belong to the platform they were made on.
        made = Programs(plan, n_passes)
        state = _abstract_state(made, mesh, rules)
        start = _place(state.length, NamedSharding(mesh, _WHOLE))
        lowers = {"run": lambda: made.run.lower(params, own, state, start, scalar)}
        if prefill_size is not None:
            lowers["prefill"] = lambda: made.prefill.lower(
                params, own, state, scalar, scalar, size=prefill_size
            )
        reports = []
        for name, lower in lowers.items():
            begun = time.monotonic()
            compiled = lower().compile()
            seconds = time.monotonic() - begun
            if text_dir is not None:
                (text_dir / f"{name}.txt").write_text(compiled.as_text() or "")
            reports.append(_report(name, seconds, compiled, params, state))
    return reports


_WHOLE = PartitionSpec()


def _place(tree: Any, shardings: Any) -> Any:
    """Gives abstract arrays their shardings."""
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings
    )


def _abstract_state(made: Programs, mesh: Mesh, rules: Rules) -> Any:
    """Returns the decode state as sharded shapes."""
    whole = NamedSharding(mesh, _WHOLE)
    split = NamedSharding(mesh, PartitionSpec(None, rules.get("kv")))

    def place(x: Any) -> NamedSharding:
        # Keys and values are the cache's only arrays of four axes, heads second.
        divides = x.ndim == 4 and x.shape[1] % mesh.size == 0
        return split if divides else whole

    state = jax.eval_shape(made.init)
    shardings = jax.tree.map(lambda _: whole, state)
    shardings = shardings.replace(cache=jax.tree.map(place, state.cache))
    return _place(state, shardings)


def _report(
    program: str, seconds: float, compiled: Any, params: Any, state: Any
) -> Report:
    """Reads a compiled program."""
    text = compiled.as_text()
    memory = compiled.memory_analysis()
    cost = compiled.cost_analysis() or {}
    matrices = [x for x in jax.tree.leaves(params) if x.ndim == 2]
    layers = [x for x in jax.tree.leaves(state.cache) if x.ndim == 4]
    # Only a tied embedding is read whole.
    looked_up = params["embedding"] if "head" in params else None
    read = [x for x in matrices if x is not looked_up]
    return Report(
        program=program,
        seconds=seconds,
        n_devices=len(compiled.input_shardings[0][0]["embedding"].device_set),
        argument_bytes=memory.argument_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        weight_bytes=_held(jax.tree.leaves(params)),
        state_bytes=_held(jax.tree.leaves(state)),
        cache_bytes=_held(layers),
        floor_bytes=_held(read) + _held(layers),
        flops=cost.get("flops"),
        accessed_bytes=cost.get("bytes accessed"),
        collectives=collectives(text),
        block_collectives=collectives(text, scope="/block_"),
        copies=whole_copies(text, [_local(x) for x in matrices + layers]),
        n_aliased=len(re.findall(r"(?:may|must)-alias", text.split("\n", 1)[0])),
        n_state=len(jax.tree.leaves(state)),
        moved=_moved(compiled, state),
    )


def _local(x: Any) -> tuple[int, ...]:
    """Returns the shape of one device's part of an abstract array."""
    return x.sharding.shard_shape(x.shape)


def _held(leaves: list[Any]) -> int:
    """Returns the bytes that one device holds of abstract arrays, without padding."""
    return sum(math.prod(_local(x)) * x.dtype.itemsize for x in leaves)


def _moved(compiled: Any, state: Any) -> tuple[str, ...]:
    """Names the leaves of the state that do not come out sharded as they went in."""
    out = compiled.output_shardings
    out = out if isinstance(out, type(state)) else out[0]
    names = [jax.tree_util.keystr(path) for path, _ in _paths(state)]
    leaves = jax.tree.leaves(state)
    return tuple(
        name
        for name, x, sharding in zip(names, leaves, jax.tree.leaves(out), strict=True)
        if not x.sharding.is_equivalent_to(sharding, x.ndim)
    )


def _paths(tree: Any) -> list[tuple[Any, Any]]:
    return jax.tree_util.tree_flatten_with_path(tree)[0]


_ITEM_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s64": 8, "f64": 8}
_COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
)
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (.*?)\s([a-z][\w\-]*)\(")
_SHAPE = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
_NAME = re.compile(r'op_name="([^"]*)"')
_FUSED = re.compile(r"kind=k\w+.*?calls=%?([\w.\-]+)")


class _Instruction(NamedTuple):
    """A line of HLO text."""

    computation: str
    operation: str
    results: list[tuple[str, tuple[int, ...]]]
    line: str


def _instructions(text: str) -> Iterator[_Instruction]:
    """Yields the instructions of HLO text."""
    computation = ""
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            computation = match[1]
        elif match := _INSTRUCTION.match(line):
            results = [
                (dtype, tuple(int(n) for n in dims.split(",") if n))
                for dtype, dims in _SHAPE.findall(match[1])
            ]
            yield _Instruction(computation, match[2], results, line)


def collectives(text: str, scope: str = "") -> dict[str, Collective]:
    """Counts the collectives of a program.

    Args:
      text: of a compiled program. What stands in a loop counts once.
      scope: count those whose operation's name, the path of named scopes, has this.

    Returns:
      Kind -> how many and how large; kinds that do not occur are left out.
    """
    found: dict[str, list[int]] = collections.defaultdict(list)
    for _, operation, results, line in _instructions(text):
        kind = operation.removesuffix("-start")
        name = _NAME.search(line)
        if kind in _COLLECTIVES and (not scope or (name and scope in name[1])):
            sizes = [_ITEM_BYTES.get(d, 4) * math.prod(dims) for d, dims in results]
            # An asynchronous one returns its operand and its result.
            found[kind].append(max(sizes) if kind != operation else sum(sizes))
    return {k: Collective(len(v), sum(v), max(v)) for k, v in sorted(found.items())}


def whole_copies(text: str, shapes: Sequence[tuple[int, ...]]) -> dict[str, int]:
    """Finds arrays of given sizes that a program makes anew.

    A matrix that a product converts on the fly is no array of its own: what stands
    inside a fusion is not looked at. In-place updates of a cache are none either.

    Args:
      text: of a compiled program.
      shapes: of the arrays to look for; the order of their axes does not matter.

    Returns:
      ``dtype[shape] operation`` -> how many. Of arrays in float32 every operation is
      given, of others copies, transpositions and conversions.
    """
    wanted = {tuple(sorted(n for n in shape if n > 1)) for shape in shapes}
    inside = set(_FUSED.findall(text))
    passed = {"parameter", "get-tuple-element", "tuple", "while", "conditional"}
    # Asynchronous copies bring an array into fast memory, where it is used once.
    passed |= {"copy-start", "copy-done"}
    moving = {"copy", "transpose", "convert"}
    found: collections.Counter[str] = collections.Counter()
    for computation, operation, results, _ in _instructions(text):
        if computation in inside or operation in passed:
            continue
        for dtype, dims in results:
            same = tuple(sorted(n for n in dims if n > 1)) in wanted
            if same and (dtype == "f32" or operation in moving):
                found[f"{dtype}{list(dims)} {operation}"] += 1
    return dict(sorted(found.items()))
