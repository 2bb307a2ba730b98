"""Generates text for one prompt, or for a JSONL file of prompts.

    generate.py --prompt="Why is the sky blue?"
    generate.py --prompts=in.jsonl --output=out.jsonl --batch_size=8
    generate.py --config=configs/generate.py --prompts=in.jsonl --output=out.jsonl

--prompt streams the text to stdout, and a line of statistics to stderr.

--prompts takes a record a line: {"id": ..., "prompt": ...}, or "turns": [...] for a
conversation, in which each turn is asked after the model's answer to the one before.
These may stand next to it and win over the flags of the same name:

    temperature, top_k, top_p, min_p, seed, max_new_tokens, stop
    max_drafts                        drafts verified a pass; 0 is plain decoding
    min_new_tokens                    no end of a turn before
    repetition_penalty, presence_penalty, frequency_penalty
    logit_bias: {"17": -2.5}          added to the logits of ids
    banned_ids: [3, 4]                never emitted
    regex: "[0-9]+"                   matches a turn's text from end to end
    json_schema: {"type": "object", ...}    a turn's text is JSON under it

and "forced_ids": {"0": 17}, the ids at positions of each turn's output, which is no
flag. Other keys are left alone. A record has one of regex and json_schema, which takes
the place of either flag; null is no constraint. What they support is described at
specjax.text.TokenMask; a text cut off by max_new_tokens is the beginning of one. Equal
constraints are built once, and all of a run share 1 GiB; records whose constraint does
not fit get an error record. The flags --logit_bias and --json_schema take JSON text, or
@FILE with it.

--output gets a record a prompt, in order of completion, to be joined by "id":

    {"id": "q1", "line": 1,           line of the prompt file, from 1
     "turns": [{"text": "...",        without special tokens and stop string
                "finish_reason": "stop",    or "length"
                "n_prompt_tokens": 12, "n_tokens": 34,
                "ids": [...],         unless --noids; an end token is the last
                "logprobs": [...],    with --logprobs: natural log, temperature 1
                "top_logprobs": [...]}],    with --top_logprobs=K: for each id, the K
                                      most probable as [[id, logprob], ...]
     "samples": [{"seed": 5,          instead of "turns" with --n_samples=N: a text, or
                  "turns": [...]}],   conversation, for each of N seeds counting up
     "stats": {...},                  specjax.Stats, summed over turns and samples
     "settings": {...}}               the record's own settings, where it has some

A record that cannot be served gets {"id", "line", "error"}, with the turns or samples
answered so far where there are any, and the run goes on. "stats" count every token that
was committed, also those after a stop string until it was seen, which depends on the
batch.

--drafter=model drafts with --draft_model, another model of the same tokens, as a chain;
--drafter=model:12 a tree of 12 nodes, at most --gamma deep. --adaptive drafts as much
as pays, by each row's acceptance and the costs of passes. These are measured at the
start (a minute, the first time); --costs=FILE keeps them, and is read where it is
there. It belongs to one model, drafter, gamma, dtype, batch size (1 for --prompt) and
kind of device, and a run of others is refused.

A run that was ended at any time goes on with the same command; error records count as
done. out.jsonl.meta.json holds the settings and the hash of the prompts; a run with
others is refused, but --batch_size may differ, and the costs. They never change a text
with --exact; without, they can where two tokens are equally probable up to rounding.
Only rules other than coupled and greedy, whose texts depend on what was drafted, need
--costs for --adaptive, and the same costs again.

Exit status: 0 done, 1 some records have errors or the run broke off, 2 refused before
any work, 130 and 143 ended by SIGINT and SIGTERM.
"""

import sys

from absl import app

from specjax import batch


def main(parsed: tuple[batch.BatchSettings, batch.Files]) -> None:
    """Runs and exits with the status."""
    sys.exit(batch.main(*parsed))


if __name__ == "__main__":
    batch.define_flags()
    app.run(main, flags_parser=batch.parse_flags)
