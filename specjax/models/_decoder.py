"""The one decoder-only transformer; families are configurations of it.

Shapes carry any number of leading "row" axes as far as possible: only attention
and the cache write know that a pass is a rectangle of R rows by T tokens.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from specjax import cache as kv
from specjax.models._config import DecoderConfig, Quantization
from specjax.models._rope import rope_tables, rotate
from specjax.ops.attention import cached_attention
from specjax.ops.linear import (
    KernelLayout,
    QuantizedKernel,
    linear,
    linear_group,
    quantize_kernel,
)
from specjax.ops.rows import row_sum
from specjax.trees import PassLayout
from specjax.typing import Array, Float, Int


class Features(NamedTuple):
    """Hidden states a pass gives to drafters.

    Attributes:
      taps: residual stream after each tapped block, float32 [R, T, D] each, in
        the order the taps were asked for.
      last: output of the final norm, what the head reads, float32 [R, T, D].
    """

    taps: tuple[Float[Array, "R T D"], ...]
    last: Float[Array, "R T D"]


class LayerSkip(NamedTuple):
    """Sublayers that are left out: the residual stream passes them by.

    Attributes:
      attention: blocks without their attention, ascending.
      ff: blocks without their feed-forward network, ascending.
    """

    attention: tuple[int, ...] = ()
    ff: tuple[int, ...] = ()

    def check(self, n_layers: int) -> None:
        """Checks that each is a block, named once, and that some attention is left.

        Raises:
          ValueError: otherwise.
        """
        for name, blocks in zip(self._fields, self, strict=True):
            if list(blocks) != sorted({i for i in blocks if 0 <= i < n_layers}):
                raise ValueError(
                    f"skip.{name}={blocks} must be ascending blocks of the model, each "
                    f"once, in [0, {n_layers})."
                )
        if len(self.attention) == n_layers:
            raise ValueError(
                "skip.attention is every block: without attention nothing of the text "
                "is seen; keep at least one."
            )


#: Leaves nothing out.
NO_SKIP = LayerSkip()


class KVBudget(NamedTuple):
    """Which part of the text attention sees: its start and its end.

    Reference: Xiao et al., "Efficient Streaming Language Models with Attention Sinks",
    arXiv:2309.17453; keys keep the positions that they were rotated for.

    Attributes:
      sinks: first tokens of the text.
      window: last tokens, the token itself included.
    """

    sinks: int
    window: int

    def check(self) -> None:
        """Checks the numbers.

        Raises:
          ValueError: a negative number of sinks, or no token to attend to.
        """
        if self.sinks < 0 or self.window < 1:
            raise ValueError(
                f"sinks={self.sinks} must be at least 0 and window={self.window} at "
                "least 1, in tokens."
            )


class QuantizedParam(nnx.Module):
    """A kernel in small integers: two parameters in the place of one.

    The scales have the kernel's axes, so that both are split alike; one scale a row is
    not split along the inputs.
    """

    def __init__(
        self,
        kernel: Float[Array, "O I"],
        how: Quantization,
        axes: tuple[str, str],
    ) -> None:
        made = quantize_kernel(kernel, bits=how.bits, group=how.group)
        out_axis, in_axis = axes
        self.values = nnx.Param(made.values, axes=axes)
        self.scales = nnx.Param(
            made.scales, axes=(out_axis, in_axis if made.scales.shape[1] > 1 else None)
        )

    def __getitem__(self, index: Any) -> QuantizedKernel:
        """Returns the kernel; as a parameter does, it takes ``...``."""
        return QuantizedKernel(self.values[index], self.scales[index])


class Dense(nnx.Module):
    """A projection with an optional bias."""

    def __init__(
        self,
        config: DecoderConfig,
        n_in: int,
        n_out: int,
        axes: tuple[str, str],
        *,
        bias: bool,
        rngs: nnx.Rngs,
    ) -> None:
        dtype = jnp.dtype(config.dtype)
        shape = (n_in, n_out)
        if config.kernel_layout == "out_in":
            shape, axes = shape[::-1], (axes[1], axes[0])
        scale = n_in**-0.5
        kernel = jax.random.normal(rngs.params(), shape, jnp.float32) * scale
        self.layout: KernelLayout = config.kernel_layout
        self.kernel = (
            nnx.Param(kernel.astype(dtype), axes=axes)
            if config.quantization is None
            else QuantizedParam(kernel, config.quantization, axes)
        )
        out_axis = axes[1] if self.layout == "in_out" else axes[0]
        self.bias = (
            nnx.Param(jnp.zeros((n_out,), dtype), axes=(out_axis,)) if bias else None
        )

    def __call__(self, x: Float[Array, "*rows I"]) -> Float[Array, "*rows O"]:
        """Projects rows; the result is float32."""
        return project(x, self)[0]


def project(
    x: Float[Array, "*rows I"], *dense: Dense
) -> tuple[Float[Array, "*rows O"], ...]:
    """Applies several projections to the same rows, as one group of products."""
    kernels = tuple(d.kernel[...] for d in dense)
    products = linear_group(x, kernels, layout=dense[0].layout)
    return tuple(
        y if d.bias is None else y + _as_row(d.bias[...], y.ndim)
        for y, d in zip(products, dense, strict=True)
    )


def _as_row(vector: Float[Array, " D"], ndim: int) -> Array:
    """Gives a parameter vector the rank of the rows it applies to, in float32."""
    return vector.astype(jnp.float32).reshape((1,) * (ndim - 1) + vector.shape)


class Norm(nnx.Module):
    """RMS norm in float32 (Zhang and Sennrich, arXiv:1910.07467)."""

    def __init__(self, width: int, eps: float, dtype: str, axis: str) -> None:
        self.eps = eps
        self.scale = nnx.Param(jnp.ones((width,), jnp.dtype(dtype)), axes=(axis,))

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        """Normalises the last axis."""
        mean_square = row_sum(x * x) / x.shape[-1]
        x = x * jax.lax.rsqrt(mean_square + self.eps)
        return x * _as_row(self.scale[...], x.ndim)


class Attention(nnx.Module):
    """Grouped-query attention over the cache."""

    def __init__(self, config: DecoderConfig, layer: int, rngs: nnx.Rngs) -> None:
        self.config = config
        self.window = config.window(layer)
        width, head = config.width, config.head_width
        n_q, n_kv = config.n_heads * head, config.n_kv_heads * head
        bias = config.qkv_bias
        self.q = Dense(config, width, n_q, ("embed", "heads"), bias=bias, rngs=rngs)
        self.k = Dense(config, width, n_kv, ("embed", "kv"), bias=bias, rngs=rngs)
        self.v = Dense(config, width, n_kv, ("embed", "kv"), bias=bias, rngs=rngs)
        self.o = Dense(
            config, n_q, width, ("heads", "embed"), bias=config.out_bias, rngs=rngs
        )
        if config.qk_norm:
            self.q_norm = Norm(head, config.norm_eps, config.dtype, "head")
            self.k_norm = Norm(head, config.norm_eps, config.dtype, "head")

    def __call__(
        self,
        x: Float[Array, "R T D"],
        cos: Float[Array, "R T M2"],
        sin: Float[Array, "R T M2"],
        layer: kv.LayerKV,
        length: Int[Array, " R"],
        row: Int[Array, ""] | None,
        budget: KVBudget | None,
        layout: PassLayout | None,
    ) -> tuple[Float[Array, "R T D"], kv.LayerKV]:
        """Writes the rows' keys and values, then attends over the cache."""
        config = self.config
        lead, head = x.shape[:-1], config.head_width
        q, k, v = project(x, self.q, self.k, self.v)
        q = q.reshape(*lead, config.n_heads, head)
        k = k.reshape(*lead, config.n_kv_heads, head)
        v = v.reshape(*lead, config.n_kv_heads, head)
        if config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        layer = kv.write(layer, k, v, length, row)
        # A layer with a window of its own never sees the start of a long text.
        window, sinks = self.window, 0
        if budget is not None and (window is None or window > budget.window):
            window, sinks = budget.window, budget.sinks if window is None else 0
        out = cached_attention(
            q,
            layer.keys,
            layer.values,
            length,
            scale=head**-0.5,
            window=window,
            sinks=sinks,
            layout=layout,
            row=row,
        )
        return self.o(out.reshape(*lead, -1)), layer


class FeedForward(nnx.Module):
    """SwiGLU feed-forward network (Shazeer, arXiv:2002.05202)."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs) -> None:
        width, hidden, bias = config.width, config.ff_width, config.ff_bias
        up, down = ("embed", "mlp"), ("mlp", "embed")
        self.gate = Dense(config, width, hidden, up, bias=bias, rngs=rngs)
        self.up = Dense(config, width, hidden, up, bias=bias, rngs=rngs)
        self.down = Dense(config, hidden, width, down, bias=bias, rngs=rngs)

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        """Applies the network to each row."""
        gate, up = project(x, self.gate, self.up)
        return self.down(jax.nn.silu(gate) * up)


class Block(nnx.Module):
    """One transformer block, pre-norm."""

    def __init__(self, config: DecoderConfig, layer: int, rngs: nnx.Rngs) -> None:
        norm = (config.width, config.norm_eps, config.dtype, "embed")
        self.attention_norm = Norm(*norm)
        self.attention = Attention(config, layer, rngs)
        self.ff_norm = Norm(*norm)
        self.ff = FeedForward(config, rngs)

    def attend(self, x: Array, *args) -> tuple[Array, kv.LayerKV]:
        """Applies the attention sublayer; see ``Attention`` for the arguments."""
        with jax.named_scope("attention"):
            mixed, layer = self.attention(self.attention_norm(x), *args)
        return x + mixed, layer

    def feed_forward(self, x: Array) -> Array:
        """Applies the feed-forward sublayer."""
        with jax.named_scope("ff"):
            return x + self.ff(self.ff_norm(x))


class Decoder(nnx.Module):
    """Embedding, blocks, final norm and head.

    The three steps are separate methods, so that a drafter can leave the stack
    early and verification can go on from where it left.
    """

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs) -> None:
        self.config = config
        dtype = jnp.dtype(config.dtype)
        shape = (config.vocab_size, config.width)
        table = jax.random.normal(rngs.params(), shape, jnp.float32)
        table = table * config.width**-0.5
        self.embedding = nnx.Param(table.astype(dtype), axes=("vocab", "embed"))
        self.blocks = nnx.List([Block(config, i, rngs) for i in range(config.n_layers)])
        self.final_norm = Norm(config.width, config.norm_eps, config.dtype, "embed")
        if not config.tied_head:
            self.head = Dense(
                config,
                config.width,
                config.vocab_size,
                ("embed", "vocab"),
                bias=False,
                rngs=rngs,
            )

    def embed(self, tokens: Int[Array, "*rows"]) -> Float[Array, "*rows D"]:
        """Looks tokens up; ids must be inside the vocabulary."""
        return self.embedding[...][tokens].astype(jnp.float32)

    def run_blocks(
        self,
        x: Float[Array, "R T D"],
        cache: kv.KVCache,
        *,
        row: Int[Array, ""] | None = None,
        start: int = 0,
        stop: int | None = None,
        taps: tuple[int, ...] = (),
        skip: LayerSkip = NO_SKIP,
        budget: KVBudget | None = None,
        layout: PassLayout | None = None,
    ) -> tuple[Float[Array, "R T D"], tuple[Array, ...], kv.KVCache]:
        """Runs blocks [start, stop) on rows at each row's committed length.

        Args:
          x: the residual stream before block ``start``.
          cache: written at [length, length + T) by each block; not committed.
          row: the one batch row the pass belongs to, or None for all rows.
          start: first block.
          stop: one past the last block; None for all.
          taps: blocks whose output is returned.
          skip: sublayers left out; their part of the cache stays as it is.
          budget: what attention sees of the text; None is all.
          layout: of rows that are a tree; None is a chain.

        Returns:
          The residual stream after the last block, the tapped outputs in the
          order of ``taps``, and the cache.
        """
        length = cache.length if row is None else cache.length[row][None]
        if layout is not None and layout.offsets.shape[-1] != x.shape[1]:
            raise ValueError(
                f"A layout of {layout.offsets.shape[-1]} rows is not that of a pass of "
                f"{x.shape[1]}: a tree of N nodes has N + 1, the pending token first."
            )
        offsets = jnp.arange(x.shape[1]) if layout is None else layout.offsets
        positions = length[:, None] + jnp.broadcast_to(offsets, x.shape[:2])
        cos, sin = rope_tables(self.config.rope, self.config.head_width, positions)
        layers = list(cache.layers)
        tapped: dict[int, Array] = {}
        stop = self.config.n_layers if stop is None else stop
        for i in range(start, stop):
            block = self.blocks[i]
            with jax.named_scope(f"block_{i}"):
                if i not in skip.attention:
                    x, layers[i] = block.attend(
                        x, cos, sin, layers[i], length, row, budget, layout
                    )
                if i not in skip.ff:
                    x = block.feed_forward(x)
            if i in taps:
                tapped[i] = x
        cache = cache.replace(layers=tuple(layers))
        return x, tuple(tapped[i] for i in taps), cache

    def logits(self, hidden: Float[Array, "*rows D"]) -> Float[Array, "*rows V"]:
        """Computes float32 logits from the final norm's output."""
        with jax.named_scope("head"):
            if self.config.tied_head:
                return linear(hidden, self.embedding[...], layout="out_in")
            return self.head(hidden)
