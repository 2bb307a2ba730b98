"""What each parameter is called in the checkpoint formats, in one table."""

from typing import Literal

import numpy as np

from specjax.models import DecoderConfig

Format = Literal["hf", "gguf"]

#: Module of the decoder -> its name in safetensors and in GGUF; ``{}`` is the
#: block. A module's kernel or norm scale is ``.weight`` there, its bias ``.bias``.
NAMES: dict[str, tuple[str, str]] = {
    "embedding": ("model.embed_tokens", "token_embd"),
    "blocks.{}.attention_norm": ("model.layers.{}.input_layernorm", "blk.{}.attn_norm"),
    "blocks.{}.attention.q": ("model.layers.{}.self_attn.q_proj", "blk.{}.attn_q"),
    "blocks.{}.attention.k": ("model.layers.{}.self_attn.k_proj", "blk.{}.attn_k"),
    "blocks.{}.attention.v": ("model.layers.{}.self_attn.v_proj", "blk.{}.attn_v"),
    "blocks.{}.attention.o": ("model.layers.{}.self_attn.o_proj", "blk.{}.attn_output"),
    "blocks.{}.attention.q_norm": (
        "model.layers.{}.self_attn.q_norm",
        "blk.{}.attn_q_norm",
    ),
    "blocks.{}.attention.k_norm": (
        "model.layers.{}.self_attn.k_norm",
        "blk.{}.attn_k_norm",
    ),
    "blocks.{}.ff_norm": (
        "model.layers.{}.post_attention_layernorm",
        "blk.{}.ffn_norm",
    ),
    "blocks.{}.ff.gate": ("model.layers.{}.mlp.gate_proj", "blk.{}.ffn_gate"),
    "blocks.{}.ff.up": ("model.layers.{}.mlp.up_proj", "blk.{}.ffn_up"),
    "blocks.{}.ff.down": ("model.layers.{}.mlp.down_proj", "blk.{}.ffn_down"),
    "final_norm": ("model.norm", "output_norm"),
    "head": ("lm_head", "output"),
}


def checkpoint_name(path: str, form: Format) -> str:
    """Returns a parameter's name in a checkpoint.

    Args:
      path: the parameter, such as ``blocks.0.attention.q.kernel``.
      form: ``hf`` (safetensors) or ``gguf``.

    Returns:
      The name, such as ``blk.0.attn_q.weight``.
    """
    module, _, leaf = path.rpartition(".")
    if not module:
        module, leaf = path, "kernel"
    parts = module.split(".")
    block = parts[1] if parts[0] == "blocks" else ""
    if block:
        parts[1] = "{}"
    name = NAMES[".".join(parts)][0 if form == "hf" else 1].format(block)
    return f"{name}.{'bias' if leaf == 'bias' else 'weight'}"


def row_order(path: str, config: DecoderConfig, form: Format) -> np.ndarray | None:
    """Returns where the stored rows of a parameter belong, or None for as stored.

    llama.cpp's ``llama`` architecture rotates neighbouring columns of a head
    (2i, 2i + 1), so its converter reorders the rows of q and k from the halves
    (i, i + M/2) that the decoder rotates; the other architectures keep them.

    Args:
      path: the parameter.
      config: the decoder.
      form: the checkpoint's format.

    Returns:
      ``order`` with ``parameter[order[j]] = stored[j]`` over output rows.
    """
    if form != "gguf" or config.family != "llama":
        return None
    module = path.rpartition(".")[0]
    if module.endswith(".attention.q"):
        heads = config.n_heads
    elif module.endswith(".attention.k"):
        heads = config.n_kv_heads
    else:
        return None
    rows = np.arange(heads * config.head_width)
    return rows.reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)
