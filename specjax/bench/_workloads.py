"""Prompts to measure on: three classes that speculation treats very differently."""

import os

from specjax.text import Record, read_records

_PASSAGE = (
    "The lighthouse on Carrow Point was built in 1871 by the engineer Thomas Wake. "
    "Its lamp burned colza oil until 1902, when a paraffin burner was fitted. "
    "The tower is 31 metres tall and stands on a granite reef that is covered at high "
    "water. Keepers lived in the tower for six weeks at a time and were relieved by "
    "boat when the sea allowed it. The light was made automatic in 1984, and the last "
    "keeper, Anna Torrance, left on the ninth of March that year."
)

_FUNCTION = '''def running_mean(values, window):
    """Return the means of all windows of a list."""
    result = []
    total = 0
    for index, value in enumerate(values):
        total += value
        if index >= window:
            total -= values[index - window]
        if index >= window - 1:
            result.append(total / window)
    return result
'''

#: Workload classes: output that quotes its prompt, chat, and code.
WORKLOADS: dict[str, tuple[str, ...]] = {
    "quoting": (
        f"Repeat the following passage word for word.\n\n{_PASSAGE}",
        f"Copy this text exactly, without any change:\n\n{_PASSAGE}",
        f"Rewrite this function with the name moving_average and change nothing else."
        f"\n\n{_FUNCTION}",
        f"Repeat this code exactly as it is:\n\n{_FUNCTION}",
    ),
    "chat": (
        "What should I think about before I adopt a dog?",
        "Give me some advice for a first job interview.",
        "Explain why the sky is blue to a ten-year-old.",
        "Plan a quiet weekend in a small town by the sea.",
    ),
    "code": (
        "Write a Python function that checks whether a string is a palindrome.",
        "Write a Python class for a stack with push, pop and peek.",
        "Write a SQL query that counts the orders of each customer in 2024.",
        "Write a JavaScript function that groups a list of objects by a key.",
    ),
}


def read_workloads(path: str | os.PathLike[str]) -> dict[str, tuple[str, ...]]:
    """Reads prompts from a JSONL file, grouped by their ``category``.

    Args:
      path: records with ``id``, ``turns`` or ``prompt``, and ``category``.

    Returns:
      First turns by category; records without one are under "all".

    Raises:
      ValueError: a record is bad; the message names its line.
    """
    groups: dict[str, list[str]] = {}
    for record in read_records(path):
        if not isinstance(record, Record):
            raise ValueError(f"{path}, line {record.line}: {record.error}")
        category = str(record.extra.get("category", "all"))
        groups.setdefault(category, []).append(record.turns[0])
    return {name: tuple(prompts) for name, prompts in groups.items()}
