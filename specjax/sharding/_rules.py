"""Rules from logical axis names to mesh axes, and what they give a model.

The names are those of ``models.logical_axes``. Attention is split by whole heads
and the feed-forward network by its hidden width, so that each layer needs one sum
over the mesh after attention and one after the feed-forward network (Shoeybi et
al., Megatron-LM, arXiv:1909.08053).
"""

from collections.abc import Mapping
from types import MappingProxyType

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from specjax.models import DecoderConfig, abstract_params, logical_axes
from specjax.typing import Params

#: Logical axis -> mesh axis, or None for not split.
Rules = Mapping[str, str | None]

#: Tensor parallelism over the mesh axis ``model``, batch rows over ``data``.
DEFAULT_RULES: Rules = MappingProxyType(
    {
        "batch": "data",
        "vocab": "model",
        "heads": "model",
        "kv": "model",
        "mlp": "model",
        "embed": None,
        "head": None,
    }
)


def make_mesh(*, model: int = 1, data: int = 1) -> Mesh:
    """Makes the mesh that ``DEFAULT_RULES`` speaks of.

    Args:
      model: devices that share each copy of the parameters.
      data: copies of the parameters.

    Returns:
      A mesh with the axes ``data`` and ``model``, whose shardings XLA propagates.

    Raises:
      ValueError: the two do not multiply to the number of devices.
    """
    n_devices = jax.device_count()
    if model < 1 or data < 1 or model * data != n_devices:
        raise ValueError(
            f"A mesh of {data=} x {model=} needs {data * model} devices; there are "
            f"{n_devices}."
        )
    auto = (AxisType.Auto, AxisType.Auto)
    return jax.make_mesh((data, model), ("data", "model"), axis_types=auto)


def logical_to_mesh(axes: tuple[str | None, ...], rules: Rules) -> PartitionSpec:
    """Maps the logical axes of one array to mesh axes.

    Args:
      axes: the logical name of each dimension; None for one that is never split.
      rules: logical name -> mesh axis or None.

    Returns:
      The partition of the array.

    Raises:
      ValueError: a name has no rule, or two dimensions map to one mesh axis.
    """
    spec: list[str | None] = []
    for axis in axes:
        if axis is not None and axis not in rules:
            raise ValueError(
                f"Logical axis {axis!r} has no rule; there are rules for "
                f"{', '.join(rules)}. Map it to a mesh axis or to None."
            )
        mesh_axis = None if axis is None else rules[axis]
        if mesh_axis is not None and mesh_axis in spec:
            other = axes[spec.index(mesh_axis)]
            raise ValueError(
                f"Logical axes {other!r} and {axis!r} of one array both map to the "
                f"mesh axis {mesh_axis!r}. Map one of them to None."
            )
        spec.append(mesh_axis)
    return PartitionSpec(*spec)


def param_shardings(
    config: DecoderConfig, mesh: Mesh, rules: Rules = DEFAULT_RULES
) -> Params:
    """Returns the sharding of each parameter of a decoder.

    Heads are never split. Where the mesh has more devices than there are key/value
    heads to share out (``n_kv_heads`` is no multiple of the axis), keys and values
    are replicated on that axis: each device then holds all of them, as it needs the
    heads of its own queries.

    Args:
      config: the decoder.
      mesh: devices; it must have the axes the rules speak of, of type Auto.
      rules: logical name -> mesh axis or None.

    Returns:
      A pytree of NamedSharding with the structure of the parameters.

    Raises:
      ValueError: the mesh lacks an axis or one is not Auto, two dimensions of an
        array map to one mesh axis, or a mesh axis does not divide the query heads,
        the vocabulary, the feed-forward width or the groups of quantised weights.
    """
    rules = _fit(config, mesh, rules)
    leaves, structure = jax.tree.flatten(abstract_params(config))
    axes = structure.flatten_up_to(logical_axes(config))
    shardings = [NamedSharding(mesh, logical_to_mesh(names, rules)) for names in axes]
    assert len(leaves) == len(shardings)
    return structure.unflatten(shardings)


def _fit(config: DecoderConfig, mesh: Mesh, rules: Rules) -> Rules:
    """Checks the rules of parameter axes against the mesh and the sizes."""
    if any(kind != AxisType.Auto for kind in mesh.axis_types):
        raise ValueError(
            f"The mesh axes {mesh.axis_names} have the types {mesh.axis_types}; XLA "
            "must be free to propagate shardings. Use sharding.make_mesh, or pass "
            "axis_types=(AxisType.Auto, ...) to jax.make_mesh."
        )
    # The unit that may not be cut: a head's columns stay together.
    units = {
        "vocab": ("vocab_size", config.vocab_size),
        "heads": ("n_heads", config.n_heads),
        "kv": ("n_kv_heads", config.n_kv_heads),
        "mlp": ("ff_width", config.ff_width),
        "embed": ("width", config.width),
        "head": ("head_width", config.head_width),
    }
    fitted = dict(rules)
    for axis, (field, size) in units.items():
        mesh_axis = rules.get(axis)
        if mesh_axis is None:
            continue
        if mesh_axis not in mesh.shape:
            raise ValueError(
                f"The rule {axis!r} -> {mesh_axis!r} names an axis the mesh lacks; it "
                f"has {tuple(mesh.shape)}. Map {axis!r} to one of these or to None."
            )
        n = mesh.shape[mesh_axis]
        if size % n == 0:
            continue
        if axis != "kv":
            raise ValueError(
                f"{field}={size} cannot be split over the {n} devices of mesh axis "
                f"{mesh_axis!r}. Use an axis whose size divides it, or map {axis!r} "
                "to None."
            )
        fitted[axis] = None
    _check_groups(config, mesh, fitted)
    return fitted


def _check_groups(config: DecoderConfig, mesh: Mesh, rules: Rules) -> None:
    """Checks that kernels are split along their inputs by whole groups or bytes."""
    how = config.quantization
    if how is None:
        return
    inputs = {
        "embed": config.width,
        "heads": config.n_heads * config.head_width,
        "mlp": config.ff_width,
    }
    for axis, size in inputs.items():
        n = mesh.shape.get(rules.get(axis) or "", 1)
        # One scale a row is held by all; then only bytes are shared out.
        unit = how.bits * size // 8 if how.group in (None, size) else size // how.group
        if unit % n:
            raise ValueError(
                f"group={how.group} of {how.bits} bits cuts the {size} inputs of axis "
                f"{axis!r} into {unit} parts, which the {n} devices of mesh axis "
                f"{rules[axis]!r} cannot share out. Use a group that gives a multiple "
                f"of {n}, or map {axis!r} to None."
            )
