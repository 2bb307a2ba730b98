"""Prefill, passes, slots, and the functions on top of them."""

from specjax.decode._cache_dir import enable_compilation_cache
from specjax.decode._compiled import (
    PREFILL_BUCKETS,
    Plan,
    Programs,
    Snapshot,
    prefill_chunks,
    programs,
)
from specjax.decode._engine import PASSES_PER_CALL, Engine, Event, Request
from specjax.decode._generate import (
    encode_prompt,
    fit_capacity,
    generate,
    resolve,
    stream,
)
from specjax.decode._results import Completion, Generation, Stats
from specjax.decode._state import DecodeState, Origin, RowStats, Status, init_state
from specjax.decode._step import PassInfo, draft, spec_step, verify_and_commit

__all__ = [
    "PASSES_PER_CALL",
    "PREFILL_BUCKETS",
    "Completion",
    "DecodeState",
    "Engine",
    "Event",
    "Generation",
    "Origin",
    "PassInfo",
    "Plan",
    "Programs",
    "Request",
    "RowStats",
    "Snapshot",
    "Stats",
    "Status",
    "draft",
    "enable_compilation_cache",
    "encode_prompt",
    "fit_capacity",
    "generate",
    "init_state",
    "prefill_chunks",
    "programs",
    "resolve",
    "spec_step",
    "stream",
    "verify_and_commit",
]
