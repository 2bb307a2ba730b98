"""Fixed-size key/value caches that roll back by moving an index."""

from specjax.cache._kv import (
    KVCache,
    LayerKV,
    check_capacity,
    commit,
    copy_row,
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
    "init_cache",
    "reset_row",
    "write",
]
