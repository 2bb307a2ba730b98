"""Prefill, passes, slots, and the functions on top of them."""

from specjax.decode._cache_dir import enable_compilation_cache
from specjax.decode._compiled import (
    PREFILL_BUCKETS,
    Plan,
    Programs,
    Snapshot,
    forget_programs,
    prefill_chunks,
    programs,
)
from specjax.decode._controls import (
    NO_CONTROLS,
    Controls,
    controls_after,
    row_controls,
    union_masks,
    union_spec,
)
from specjax.decode._engine import PASSES_PER_CALL, Engine, Event, Request, stop_ids
from specjax.decode._generate import (
    encode_prompt,
    fit_capacity,
    generate,
    resolve,
    stream,
)
from specjax.decode._results import Completion, Generation, Stats
from specjax.decode._state import (
    DecodeState,
    Origin,
    RowStats,
    Status,
    init_state,
    with_masks,
)
from specjax.decode._step import PassInfo, draft, spec_step, verify_and_commit

__all__ = [
    "NO_CONTROLS",
    "PASSES_PER_CALL",
    "PREFILL_BUCKETS",
    "Completion",
    "Controls",
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
    "controls_after",
    "draft",
    "enable_compilation_cache",
    "encode_prompt",
    "fit_capacity",
    "forget_programs",
    "generate",
    "init_state",
    "prefill_chunks",
    "programs",
    "resolve",
    "row_controls",
    "spec_step",
    "stop_ids",
    "stream",
    "union_masks",
    "union_spec",
    "verify_and_commit",
    "with_masks",
]
