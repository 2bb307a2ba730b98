"""Chooses how a pass is verified and sampled."""

from typing import Any

import jax.numpy as jnp

from specjax.ops.choose import Implementation, choose
from specjax.ops.verify_sample.reference import (
    Decision,
    Drafts,
    RowSettings,
    verify_sample_reference,
)
from specjax.typing import Array, Float

#: Rules by name that the operation knows.
RULES = ("greedy", "coupled", "rejection")


def verify_sample(
    logits: Float[Array, "B N1 V"],
    drafts: Drafts,
    settings: RowSettings,
    noise: Any,
    *,
    rule: str,
    implementation: Implementation | None = None,
) -> Decision:
    """Goes from a pass's logits to what is kept of the drafts and what follows them.

    The definition is ``verify_sample_reference``: the one warp (temperature, top-k,
    top-p, min-p), then the rule of that name on the same noise. A kernel decides the
    same, except that its sums round otherwise: where a test or a draw is within
    float32 rounding of going the other way, it may.

    Args:
      logits: float32 or bfloat16, natural log scale; row i scores draft i, row N what
        follows all of them. Rows beyond ``n_valid`` may hold anything.
      drafts: a chain; ids inside the vocabulary, ``n_valid`` in [0, N].
      settings: one value a batch row.
      noise: for ``greedy`` None; for ``coupled`` ``sampling.gumbel_noise``
        [B, N+1, Z]; for ``rejection`` a ``sampling.UniformNoise``.
      rule: ``greedy`` (which looks at no settings), ``coupled`` or ``rejection``.
      implementation: ``xla``, ``pallas_tpu`` or ``pallas_gpu``; None: the platform's
        kernel if it can take this pass, else ``xla``.

    Returns:
      The decision.

    Raises:
      ValueError: shapes do not agree, the rule is not known, the drafts are a tree,
        or the implementation that was named can't take this pass.
    """
    if rule not in RULES:
        raise ValueError(f"{rule=} is not known here; use one of {RULES}.")
    if drafts.parents is not None:
        raise ValueError("The drafts are a tree; this operation takes chains.")
    batch, width, vocab = logits.shape
    if drafts.tokens.shape != (batch, width - 1) or drafts.n_valid.shape != (batch,):
        raise ValueError(
            f"{logits.shape=}, {drafts.tokens.shape=} and {drafts.n_valid.shape=} do "
            "not agree."
        )
    law = drafts.logprobs
    if rule == "rejection" and law is not None:
        if law.shape != (batch, width - 1, vocab):
            raise ValueError(f"{law.shape=} and {logits.shape=} do not agree.")

    def unsupported(kernel: Implementation) -> str | None:
        n_drafts = width - 1
        supports = _kernel(kernel).supports
        return supports(logits, n_drafts=n_drafts, rule=rule, logprobs=law)

    chosen = choose(implementation, unsupported)
    if chosen == "xla":
        return verify_sample_reference(logits, drafts, settings, noise, rule=rule)
    given: dict[str, Any] = {}
    if rule == "coupled":
        given["gumbel"] = noise
    elif rule == "rejection":
        given |= {"accept": noise.accept, "draw": noise.draw, "logprobs": law}
    return Decision(
        *_kernel(chosen).verify_sample(
            logits,
            drafts.tokens.astype(jnp.int32),
            drafts.n_valid,
            rule=rule,
            temperature=settings.temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
            min_p=settings.min_p,
            **given,
        )
    )


def _kernel(implementation: Implementation) -> Any:
    """Imports a kernel's module; nothing of Pallas is looked for before."""
    if implementation == "pallas_tpu":
        from kernels_pallas.verify_sample import kernel_tpu

        return kernel_tpu
    from kernels_pallas.verify_sample import kernel_gpu

    return kernel_gpu
