"""Fixed-size key/value caches that roll back by moving an index."""

from specjax.cache._kv import (
    KVCache,
    LayerKV,
    check_capacity,
    commit,
    copy_row,
    gather_path,
    init_cache,
    reset_row,
    write,
)

__all__ = [
    "KVCache",
    "LayerKV",
    "check_capacity",
    "commit",
    "copy_row",
    "gather_path",
    "init_cache",
    "reset_row",
    "write",
]
