"""Compiles a target's cases in a process of its own; prints reports as JSON lines."""

import argparse
import dataclasses
import json
import pathlib
import traceback

from specjax import drafters, verify
from specjax.decode._compiled import Plan
from specjax.models import DecoderConfig, Quantization, RopeConfig, decoder_target
from specjax.sharding import DEFAULT_RULES
from specjax.testing import aot
from specjax.trees import sequoia

LLAMA = dict(
    vocab_size=128256,
    width=4096,
    n_heads=32,
    n_kv_heads=8,
    head_width=128,
    ff_width=14336,
    rope=RopeConfig(theta=500000.0),
    max_context=8192,
)
SMOLLM2 = dict(
    vocab_size=49152,
    width=576,
    n_layers=30,
    n_heads=9,
    n_kv_heads=3,
    head_width=64,
    ff_width=1536,
    rope=RopeConfig(theta=100000.0),
    max_context=8192,
    tied_head=True,
)
#: As many rows a pass as the chains' seven.
TREE = sequoia((0.5, 0.2, 0.1), 6, max_depth=3)
QUANTIZED = {"int8": Quantization(8), "int4": Quantization(4, 32)}
# Nine query heads are no multiple of two or four devices: attention stays whole.
WHOLE_HEADS = {**DEFAULT_RULES, "heads": None}
MODELS = {
    "llama": (DecoderConfig(n_layers=4, dtype="bfloat16", **LLAMA), DEFAULT_RULES),
    "llama32": (DecoderConfig(n_layers=32, dtype="bfloat16", **LLAMA), DEFAULT_RULES),
    "smollm2": (DecoderConfig(dtype="bfloat16", **SMOLLM2), WHOLE_HEADS),
}


def has_prefill(case):
    """Whether a case compiles prefill too."""
    return case in ("llama/greedy", "smollm2/greedy")


def report(target, case, text_dir=None):
    """Compiles ``model/rule``, or that with ``/exact``, ``/int8`` or ``/tree``."""
    model, rule, *options = case.split("/")
    config, rules = MODELS[model]
    exact = "exact" in options
    draft, drafter = None, drafters.prompt_lookup(6)
    if "tree" in options:
        drafter = drafters.token_recycling(config.vocab_size, TREE)
    for how in (QUANTIZED[name] for name in options if name in QUANTIZED):
        draft = dataclasses.replace(config, quantization=how, kernel_layout="out_in")
        drafter = drafters.self_draft(decoder_target(draft), 6)
    plan = Plan(
        target=decoder_target(config),
        drafter=drafter,
        rule=verify.by_name(rule),
        batch=4,
        capacity=1008,
        widths=(7,) if exact else (1, 7),
        exact=exact,
    )
    # Prefill knows neither rule nor width: one case of a shape shows it. 64 rows,
    # since activations of 256 rows have the shape of a kernel's part.
    return aot.compile_decode(
        plan,
        aot.devices(target),
        config=config,
        draft=draft,
        rules=rules,
        prefill_size=64 if has_prefill(case) else None,
        text_dir=text_dir,
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("target")
    parser.add_argument("cases", nargs="+")
    parser.add_argument("--text", type=pathlib.Path)
    args = parser.parse_args()
    for case in args.cases:
        text_dir = None
        if args.text is not None:
            text_dir = args.text / args.target / case
            text_dir.mkdir(parents=True, exist_ok=True)
        try:
            reports = [r._asdict() for r in report(args.target, case, text_dir)]
            line = {"case": case, "reports": reports}
        except Exception:
            line = {"case": case, "error": traceback.format_exc()}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
