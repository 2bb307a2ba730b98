"""Generation over a file of prompts: what ``scripts/generate.py`` runs.

``run_file`` takes prompts from a JSONL file and appends a record for each to another,
so that a run killed at any time goes on where it was; ``run_prompt`` streams the text
of one prompt; ``main`` picks one of them and turns errors into exit statuses.
"""

from specjax.batch._datastore import (
    load_tokenizer,
    read_documents,
    write_datastore,
)
from specjax.batch._errors import Interrupted, RunError, UsageError
from specjax.batch._flags import define_flags, parse_flags, read_flags
from specjax.batch._main import Files, main
from specjax.batch._output import Done, OutputFile
from specjax.batch._run import Summary, run_file
from specjax.batch._settings import BatchSettings
from specjax.batch._single import run_prompt

__all__ = [
    "BatchSettings",
    "Done",
    "Files",
    "Interrupted",
    "OutputFile",
    "RunError",
    "Summary",
    "UsageError",
    "define_flags",
    "load_tokenizer",
    "main",
    "parse_flags",
    "read_documents",
    "read_flags",
    "run_file",
    "run_prompt",
    "write_datastore",
]
