"""Builds a datastore for the drafter ``suffix`` from text files or JSONL.

    build_datastore.py --output=store.npz corpus/*.txt prompts.jsonl
    build_datastore.py --output=store.npz --append=store.npz out.jsonl
    generate.py --drafter=suffix --datastore=store.npz --prompts=... --output=...

A text file is one document. A line of a JSONL file is a record: {"text": ...}, a
record of prompts as scripts/generate.py reads it ("prompt", or "turns": ["...", ...]),
or one of its output records, whose answers are taken with their ids, so that a run's
own outputs can be drafted from in the next. No match and no draft reads over the end of
a document. The file knows the tokenizer it was made with and goes with that one only.

Datastores of one size share compiled programs: the size is a power of two, or --size,
and adding documents keeps it as long as they fit.

Exit status: 0, or 2 where something was refused and nothing was written.
"""

import sys

from absl import app, flags, logging

from specjax import batch

FLAGS = flags.FLAGS
flags.DEFINE_string("output", None, "The .npz file to write.", required=True)
flags.DEFINE_string(
    "model", "smollm2-135m-instruct", "Name, path or hub id: whose tokenizer to use."
)
flags.DEFINE_string("append", None, "A datastore that the documents are added to.")
flags.DEFINE_integer("size", None, "Tokens to make room for.", lower_bound=1)


def _parse(argv: list[str]) -> list[str]:
    """Parses the flags; a wrong one exits with 2, where absl would with 1."""
    try:
        return FLAGS(argv)
    except flags.Error as error:
        print(f"error: {error}\nSee --helpshort for the flags.", file=sys.stderr)
        sys.exit(2)


def main(argv: list[str]) -> None:
    """Builds, and exits with the status."""
    logging.set_verbosity(logging.WARNING)  # JAX tells of backends it lacks
    try:
        done = batch.write_datastore(
            argv[1:],
            FLAGS.output,
            model=FLAGS.model,
            append=FLAGS.append,
            size=FLAGS.size,
        )
    except batch.UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print(done)


if __name__ == "__main__":
    app.run(main, flags_parser=_parse)
