"""Makes the golden models of this folder with transformers and torch.

Run by hand, where both are installed (made with torch 2.13, transformers 5.24):

    python tests/golden/models/make_golden.py

Each case is a tiny random model, saved as Hugging Face saves it, and the logits of
one token sequence. Norm scales and biases are random too, so that leaving one out
shows. ``dynamic`` and ``longrope`` depend on the length so far; their logits are
those of token-by-token decoding with the key/value cache, where a key keeps the
rotation it was cached with.
"""

import json
import pathlib

import numpy as np
import torch
import transformers

FOLDER = pathlib.Path(__file__).parent
N_TOKENS = 28
VOCAB = 89
BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "attn_implementation": "eager",
}
# Wavelengths 6.3 to 353 tokens: some on each side of the original contexts below.
THETA = 100.0
STEPWISE = ("dynamic", "longrope")


def rope(kind, max_position=64, **keys):
    """A Llama with heads of width 16 and a scaled rotary embedding."""
    parameters = {"rope_type": kind, "rope_theta": THETA, **keys}
    return {
        "architecture": "Llama",
        "head_dim": 16,
        "tie_word_embeddings": True,
        "max_position_embeddings": max_position,
        "rope_parameters": parameters,
    }


CASES = {
    "llama_tied": {"architecture": "Llama", "tie_word_embeddings": True},
    "llama_bias": {
        "architecture": "Llama",
        "attention_bias": True,
        "mlp_bias": True,
        "num_key_value_heads": 4,
        "num_hidden_layers": 3,
    },
    "smollm2": {
        "architecture": "Llama",
        "hidden_size": 48,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    },
    "qwen2": {"architecture": "Qwen2", "tie_word_embeddings": True},
    "qwen2_window": {
        "architecture": "Qwen2",
        "num_hidden_layers": 3,
        "use_sliding_window": True,
        "sliding_window": 6,
        "max_window_layers": 1,
    },
    "qwen3": {"architecture": "Qwen3", "head_dim": 16},
    "mistral_window": {"architecture": "Mistral", "sliding_window": 8},
    "llama_linear": rope("linear", factor=2.5),
    "llama_dynamic": rope("dynamic", max_position=12, factor=2.0),
    "llama_llama3": rope(
        "llama3",
        factor=4.0,
        low_freq_factor=0.5,
        high_freq_factor=2.0,
        original_max_position_embeddings=16,
    ),
    "llama_yarn": rope("yarn", factor=4.0, original_max_position_embeddings=16),
    "llama_yarn_mscale": rope(
        "yarn",
        factor=4.0,
        original_max_position_embeddings=16,
        beta_fast=2.0,
        beta_slow=0.25,
        mscale=1.3,
        mscale_all_dim=0.7,
        truncate=False,
    ),
    "llama_longrope": rope(
        "longrope",
        max_position=48,
        original_max_position_embeddings=12,
        short_factor=[1.0, 1.05, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6],
        long_factor=[1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0],
    ),
}
# Saved the way configs were written before transformers 5.
OLD_SPELLING = ("smollm2", "qwen2", "llama_linear", "llama_llama3", "llama_dynamic")


def randomise(model, generator):
    """Draws every parameter at a scale that keeps attention peaked."""
    with torch.no_grad():
        for name, value in model.named_parameters():
            noise = torch.randn(value.shape, generator=generator)
            if name.endswith("bias"):
                value.copy_(0.4 * noise)
            elif "norm" in name:
                value.copy_(1 + 0.3 * noise)
            elif "embed" in name:
                value.copy_(noise)
            else:
                gain = 2.0 if "q_proj" in name or "k_proj" in name else 1.0
                value.copy_(gain * noise * value.shape[-1] ** -0.5)


def stepwise(model, tokens):
    """Logits of token-by-token decoding with the cache."""
    cache, rows = transformers.DynamicCache(config=model.config), []
    for position in range(tokens.shape[1]):
        out = model(
            tokens[:, position : position + 1], past_key_values=cache, use_cache=True
        )
        rows.append(out.logits[:, 0])
    return torch.stack(rows, dim=1)


def use_old_spelling(path):
    """Turns rope_parameters into rope_theta and rope_scaling."""
    config = json.loads(path.read_text())
    keys = config.pop("rope_parameters")
    config["rope_theta"] = keys.pop("rope_theta")
    keys["type"] = keys.pop("rope_type")
    config["rope_scaling"] = None if keys["type"] == "default" else keys
    path.write_text(json.dumps(config, indent=2) + "\n")


def make(name, case, seed):
    """Makes one case."""
    case = dict(case)
    architecture = case.pop("architecture")
    config = getattr(transformers, f"{architecture}Config")(**{**BASE, **case})
    model = getattr(transformers, f"{architecture}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(seed)
    randomise(model, generator)
    tokens = torch.randint(3, VOCAB, (1, N_TOKENS), generator=generator)
    with torch.no_grad():
        logits = stepwise(model, tokens)
        if not name.endswith(STEPWISE):
            whole = model(tokens, use_cache=False).logits
            assert (whole - logits).abs().max() < 1e-4, name
            logits = whole
    folder = FOLDER / name
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    if name in OLD_SPELLING:
        use_old_spelling(folder / "config.json")
    np.savez(
        folder / "golden.npz",
        tokens=tokens[0].numpy().astype(np.int32),
        logits=logits[0].numpy(),
    )
    size = (folder / "model.safetensors").stat().st_size
    print(f"{name}: {size} bytes, logits std {logits.std():.2f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for seed, (name, case) in enumerate(CASES.items()):
        make(name, case, seed)
