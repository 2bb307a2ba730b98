"""Generates text for one prompt, or for a JSONL file of prompts.

    generate.py --prompt="Why is the sky blue?"
    generate.py --prompts=in.jsonl --output=out.jsonl --batch_size=8
    generate.py --config=configs/generate.py --prompts=in.jsonl --output=out.jsonl

--prompt streams the text to stdout, and a line of statistics to stderr.

--prompts takes a record a line: {"id": ..., "prompt": ...}, or "turns": [...] for a
conversation, in which each turn is asked after the model's answer to the one before.
"temperature", "top_k", "top_p", "min_p", "seed", "max_new_tokens" and "stop" may stand
next to it and win over the flags. Other keys are left alone.

--output gets a record a prompt, in order of completion, to be joined by "id":

    {"id": "q1", "line": 1,           line of the prompt file, from 1
     "turns": [{"text": "...",        without special tokens and stop string
                "finish_reason": "stop",    or "length"
                "n_prompt_tokens": 12, "n_tokens": 34,
                "ids": [...],         unless --noids; an end token is the last
                "logprobs": [...]}],  with --logprobs: natural log, temperature 1
     "stats": {...},                  specjax.Stats, summed over the turns
     "settings": {...}}               the record's own settings, where it has some

A record that cannot be served gets {"id", "line", "error"}, with the turns answered so
far where there are any, and the run goes on. "stats" count every token that was
committed, also those after a stop string until it was seen, which depends on the batch.

A run that was ended at any time goes on with the same command; error records count as
done. out.jsonl.meta.json holds the settings and the hash of the prompts; a run with
others is refused, but --batch_size may differ. It never changes a text with --exact;
without, it can where two tokens are equally probable up to rounding.

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
