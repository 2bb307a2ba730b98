"""JAX's persistent compilation cache, switched on."""

import os
import pathlib

import jax


def enable_compilation_cache() -> str | None:
    """Makes compiled programs outlive the process, for scripts and notebooks.

    A directory that the user chose (``JAX_COMPILATION_CACHE_DIR`` or jax.config) is
    kept, and an empty JAX_COMPILATION_CACHE_DIR leaves the cache off. Otherwise it is
    ``specjax/jax`` in the user's cache directory. A library must not change global
    settings by being imported, so this is a call.

    Returns:
      The directory, or None where the cache is off.
    """
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return os.environ["JAX_COMPILATION_CACHE_DIR"] or None
    if jax.config.jax_compilation_cache_dir:
        return jax.config.jax_compilation_cache_dir
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    path = pathlib.Path(base) / "specjax" / "jax"
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None  # a read-only home: compile anew each time
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
    return str(path)
