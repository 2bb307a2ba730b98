"""From the tensors of a checkpoint to placed parameters, one tensor at a time."""

import functools
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from specjax.models import DecoderConfig, abstract_params
from specjax.sharding import Rules, param_shardings
from specjax.typing import Params
from specjax.weights._names import Format, checkpoint_name, row_order

# Elements converted at a time: 16 MiB of float32 beside the finished tensor.
_CHUNK = 1 << 22


class StoredTensor(NamedTuple):
    """A tensor of a checkpoint that has not been read yet.

    Attributes:
      shape: row-major; kernels are [out, in].
      kind: the stored type, for messages.
      readable: whether this type can be converted.
      rows: (start, stop) -> rows of the tensor, any floating dtype.
    """

    shape: tuple[int, ...]
    kind: str
    readable: bool
    rows: Callable[[int, int], np.ndarray]


def flat_params(tree: Any) -> dict[str, Any]:
    """Returns leaves by dotted path, such as ``blocks.0.attention.q.kernel``."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {".".join(str(key.key) for key in path): leaf for path, leaf in leaves}


@functools.lru_cache(maxsize=8)
def flat_abstract(config: DecoderConfig) -> Mapping[str, jax.ShapeDtypeStruct]:
    """Returns ``abstract_params`` by dotted path; tracing the model takes a while."""
    return MappingProxyType(flat_params(abstract_params(config)))


def nested_params(flat: Mapping[str, Any]) -> Params:
    """Undoes ``flat_params``."""
    tree: Params = {}
    for path, leaf in flat.items():
        *modules, name = path.split(".")
        node = tree
        for module in modules:
            node = node.setdefault(module, {})
        node[name] = leaf
    return tree


def is_transposed(path: str, config: DecoderConfig) -> bool:
    """Says whether a parameter is stored [out, in] but kept [in, out]."""
    return path.endswith(".kernel") and config.kernel_layout == "in_out"


def check_tensors(
    config: DecoderConfig,
    tensors: Mapping[str, StoredTensor],
    form: Format,
    *,
    origin: str,
    ignore: Callable[[str], bool],
) -> None:
    """Checks names, shapes and types before any tensor is read.

    Args:
      config: the decoder that the tensors must make up.
      tensors: what the checkpoint holds.
      form: its format.
      origin: the checkpoint, for the message.
      ignore: says which further tensors are harmless.

    Raises:
      ValueError: one error that lists everything missing, left over, of a wrong
        shape or of a type that cannot be read.
    """
    problems = []
    wanted = {}
    for path, leaf in flat_abstract(config).items():
        shape = leaf.shape[::-1] if is_transposed(path, config) else leaf.shape
        wanted[checkpoint_name(path, form)] = shape
    head = checkpoint_name("head.kernel", form)
    if config.tied_head and head in tensors:
        wanted[head] = (config.vocab_size, config.width)
    for name, shape in wanted.items():
        if name not in tensors:
            problems.append(f"missing: {name} {list(shape)}")
            continue
        stored = tensors[name]
        if tuple(stored.shape) != tuple(shape):
            problems.append(
                f"wrong shape: {name} is {list(stored.shape)}, the configuration "
                f"needs {list(shape)}"
            )
        if not stored.readable:
            problems.append(f"type that cannot be read: {name} is {stored.kind}")
    for name, stored in tensors.items():
        if name not in wanted and not ignore(name):
            problems.append(f"not part of the model: {name} {list(stored.shape)}")
    raise_problems(origin, config, problems)


def raise_problems(origin: str, config: DecoderConfig, problems: list[str]) -> None:
    """Raises one ValueError that lists all problems, if there are any."""
    if problems:
        lines = "\n  ".join(problems)
        raise ValueError(
            f"{origin} does not hold the tensors of its configuration "
            f"({config.family}, {config.n_layers} layers):\n  {lines}"
        )


def assemble(
    config: DecoderConfig,
    tensors: Mapping[str, StoredTensor],
    form: Format,
    *,
    origin: str,
    mesh: Mesh | None,
    rules: Rules,
) -> Params:
    """Reads, converts and places the parameters.

    Host memory beyond the placed parameters stays near the largest tensor's size:
    tensors are finished one at a time, the largest first.

    Args:
      config: gives the final dtype and layout; ``check_tensors`` has passed.
      tensors: what the checkpoint holds.
      form: its format.
      origin: the checkpoint, for messages.
      mesh: devices to place the parameters on, or None for the default device.
      rules: logical axis -> mesh axis; used with a mesh.

    Returns:
      The parameters.

    Raises:
      ValueError: a head is stored beside a tied configuration and differs from
        the embedding, or the parameters do not fit the mesh.
    """
    abstract = flat_abstract(config)
    shardings: dict[str, Any] = dict.fromkeys(abstract)
    if mesh is not None:
        shardings = flat_params(param_shardings(config, mesh, rules))
    head = checkpoint_name("head.kernel", form)
    if config.tied_head and head in tensors:
        embedding = tensors[checkpoint_name("embedding", form)]
        if not _equal(embedding, tensors[head]):
            raise ValueError(
                f"{origin}: the configuration ties the head to the embedding, but "
                f"{head} is stored and differs from it. Set tie_word_embeddings to "
                "false, or remove the tensor."
            )
    placed = {}
    for path in sorted(abstract, key=lambda path: -abstract[path].size):
        value = _convert(
            tensors[checkpoint_name(path, form)],
            np.dtype(jnp.dtype(config.dtype)),
            transpose=is_transposed(path, config),
            order=row_order(path, config, form),
        )
        placed[path] = _place(value, shardings[path])
    return nested_params({path: placed[path] for path in abstract})


def _spans(shape: tuple[int, ...]) -> Iterable[tuple[int, int]]:
    """Yields row ranges of about ``_CHUNK`` elements."""
    row = int(np.prod(shape[1:], dtype=np.int64))
    step = max(1, _CHUNK // row)
    for start in range(0, shape[0], step):
        yield start, min(start + step, shape[0])


def _convert(
    stored: StoredTensor, dtype: np.dtype, *, transpose: bool, order: np.ndarray | None
) -> np.ndarray:
    shape = stored.shape[::-1] if transpose else stored.shape
    out = np.empty(shape, dtype)
    by_row = out.T if transpose else out
    for start, stop in _spans(stored.shape):
        rows = slice(start, stop) if order is None else order[start:stop]
        by_row[rows] = stored.rows(start, stop)
    return out


def _place(value: np.ndarray, sharding: Any) -> jax.Array:
    if sharding is None:
        placed = jax.device_put(value)
    else:
        # Not device_put: over several hosts it would compare the hosts' values.
        placed = jax.make_array_from_callback(
            value.shape, sharding, lambda index: value[index]
        )
    # A transfer under way keeps the host copy alive.
    return placed.block_until_ready()


def _equal(one: StoredTensor, other: StoredTensor) -> bool:
    return all(
        np.array_equal(one.rows(*span), other.rows(*span)) for span in _spans(one.shape)
    )
