"""What request settings mean: one row, one token at a time, in NumPy and float64."""

from collections.abc import Sequence

import numpy as np

from specjax.decode import Controls


def controlled_logits(
    logits: np.ndarray,
    controls: Controls,
    *,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    stop_ids: Sequence[int] = (),
) -> np.ndarray:
    """Applies a request's controls to the logits of its next token.

    Args:
      logits: of the token after prompt and output, [V].
      controls: the request's.
      prompt_ids: the prompt.
      output_ids: what was generated so far; the constraint allows it.
      stop_ids: ids that end the sequence.

    Returns:
      The controlled logits, float64 [V], -inf where a token may not stand.

    Raises:
      ValueError: the constraint does not allow the output.
    """
    x = np.asarray(logits, np.float64).copy()
    for token, value in controls.logit_bias.items():
        x[token] += value
    x[list(controls.banned_ids)] = -np.inf
    output = list(output_ids)
    for token in set(prompt_ids) | set(output):
        factor = controls.repetition_penalty
        x[token] = x[token] / factor if x[token] > 0 else x[token] * factor
    for token in set(output):
        x[token] -= controls.presence_penalty
        x[token] -= controls.frequency_penalty * output.count(token)
    at = len(output)
    if at in controls.forced_ids:
        x = np.where(np.arange(len(x)) == controls.forced_ids[at], 0.0, -np.inf)
    if at < controls.min_new_tokens:
        x[list(stop_ids)] = -np.inf
    if controls.token_mask is not None:
        state = controls.token_mask.advance(output)
        x[~controls.token_mask.allowed(state)] = -np.inf
    return x


def sampling_law(
    logits: np.ndarray, *, temperature: float, top_p: float = 1.0
) -> np.ndarray:
    """Returns the law that a token is drawn from: temperature, then top-p, by sorting.

    Args:
      logits: [..., V].
      temperature: above 0.
      top_p: in (0, 1].

    Returns:
      Probabilities, float64, of the shape of the logits.
    """
    scaled = np.asarray(logits, np.float64) / temperature
    p = np.exp(scaled - scaled.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    for row in p.reshape(-1, p.shape[-1]):
        order = np.argsort(-row, kind="stable")
        before = np.cumsum(row[order]) - row[order]
        row[order[before >= top_p]] = 0.0
        row /= row.sum()
    return p
