"""What platform the code being traced will run on.

Operations choose their implementation while they are traced. The default is
the platform of JAX's default backend; ahead-of-time compilation for chips that
are not here sets the platform explicitly with :func:`target_platform`.
"""

import contextlib
import contextvars
from collections.abc import Iterator

import jax

PLATFORMS = ("cpu", "gpu", "tpu")

_TARGET: contextvars.ContextVar[str | None] = contextvars.ContextVar(
    "specjax_target_platform", default=None
)

_ROW_INVARIANT: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "specjax_row_invariant", default=False
)

# XLA:CPU hoists bfloat16 -> float32 conversions of the weights out of the
# decode loop, which materialises a float32 copy of the whole model (538 MB for
# a 135M model) and then streams that: twice the memory and half the speed.
# Nothing else in a decode loop is worth hoisting.
_CPU_OPTIONS = {
    "xla_disable_hlo_passes": (
        "while-loop-invariant-code-motion,while-loop-expensive-invariant-code-motion"
    )
}


def current_platform() -> str:
    """Returns the platform that operations are lowered for: cpu, gpu or tpu."""
    target = _TARGET.get()
    if target is not None:
        return target
    backend = jax.default_backend()
    return backend if backend in PLATFORMS else "gpu"


@contextlib.contextmanager
def target_platform(platform: str) -> Iterator[None]:
    """Makes operations traced inside lower for ``platform``.

    Args:
      platform: one of ``cpu``, ``gpu``, ``tpu``.

    Yields:
      Nothing.

    Raises:
      ValueError: the platform is not known.
    """
    if platform not in PLATFORMS:
        raise ValueError(f"{platform=} is not known; use one of {PLATFORMS}.")
    token = _TARGET.set(platform)
    try:
        yield
    finally:
        _TARGET.reset(token)


@contextlib.contextmanager
def row_invariant(active: bool = True) -> Iterator[None]:
    """Makes products traced inside independent of how many rows they have.

    Backends pick a matrix product's algorithm, hence its rounding, by the number of
    rows. Inside this context a row's result has the same bits whatever the batch
    and the width of the pass, at the cost of padding and splitting rows.

    Args:
      active: False leaves things as they are.

    Yields:
      Nothing.
    """
    token = _ROW_INVARIANT.set(active)
    try:
        yield
    finally:
        _ROW_INVARIANT.reset(token)


def is_row_invariant() -> bool:
    """Returns whether code is traced inside ``row_invariant``."""
    return _ROW_INVARIANT.get()


def compiler_options(platform: str | None = None) -> dict[str, str] | None:
    """Returns the XLA options that decode loops need on a platform, or None."""
    platform = platform or current_platform()
    return dict(_CPU_OPTIONS) if platform == "cpu" else None
