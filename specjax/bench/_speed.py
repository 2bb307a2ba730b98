"""Timing decoding, several ways side by side in one run."""

import dataclasses
import statistics
import time
from collections.abc import Sequence

from specjax.decode import Completion, Engine, Request, Stats


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One timed request.

    Attributes:
      prefill_s: seconds until the prompt was in the cache.
      decode_s: seconds from then to the last token.
      n_tokens: tokens generated.
      passes: target passes.
      ids: the generated ids.
      stats: what speculation did, or None where that is not known (peers).
    """

    prefill_s: float
    decode_s: float
    n_tokens: int
    passes: int
    ids: tuple[int, ...]
    stats: Stats | None = None

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second of decoding, prefill left out."""
        return self.n_tokens / self.decode_s


def measure(engine: Engine, request: Request) -> Measurement:
    """Times one request on an idle engine.

    Args:
      engine: an engine without work.
      request: the request.

    Returns:
      Its times and counts. The first call of an engine includes compilation.

    Raises:
      ValueError: the engine is busy.
    """
    if engine.busy:
        raise ValueError("measure needs an idle engine; finish its requests first.")
    began = time.perf_counter()
    engine.submit(request)
    engine.admit()
    engine.wait()
    filled = time.perf_counter()
    completion: Completion | None = None
    while engine.busy:
        for event in engine.step():
            completion = event.completion or completion
    ended = time.perf_counter()
    assert completion is not None
    return Measurement(
        prefill_s=filled - began,
        decode_s=ended - filled,
        n_tokens=len(completion.ids),
        passes=completion.stats.passes,
        ids=completion.ids,
        stats=completion.stats,
    )


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Returns the median of pairwise ratios of two interleaved series.

    Pairs measured one right after the other share the machine's mood; their ratio is
    steadier than the ratio of two medians.
    """
    pairs = zip(numerators, denominators, strict=True)
    return statistics.median(a / b for a, b in pairs)
