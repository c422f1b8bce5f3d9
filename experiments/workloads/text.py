"""Alpaca, GSM8K and Python's own reference as prompts and responses."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from experiments.workloads.base import Options, Split, WorkloadError
from experiments.workloads.sources import folder_of, from_hub, missing, split_of


@dataclass(frozen=True)
class Example:
    """What a model is given, and what it is to write."""

    prompt: str
    response: str


Splits = dict[Split, list[Example]]
Row = Mapping[str, Any]

_SECTION = 8  # paragraphs that stay together
_SHORTEST = 40  # characters; shorter paragraphs are headings and lone names


def load(dataset: str, options: Options) -> Splits:
    """A dataset's three splits, which share no example."""
    return _load(dataset, options.data_folder)


@lru_cache(maxsize=4)  # a sweep makes the same workload many times in one process
def _load(dataset: str, data: Path | None) -> Splits:
    return DATASETS[dataset](Options(data=data))


def alpaca(options: Options) -> Splits:
    """Alpaca has no test set, so a part of it is held out for that too. The few empty responses are left out."""
    folder = folder_of("alpaca", options)
    rows = from_hub("alpaca")["train"] if folder is None else _read_json(_only(folder, "*.json"))
    examples = _examples(rows, alpaca_example, folder)
    return _divide(example for example in examples if example.response)


def alpaca_example(row: Row) -> Example:
    r"""Alpaca's headings, without its preamble: a small model's sequence is too short for forty constant tokens.

    >>> alpaca_example({"instruction": "Add.", "input": "1, 2", "output": "3"}).prompt
    '### Instruction:\nAdd.\n\n### Input:\n1, 2\n\n### Response:\n'
    """
    task = f"### Instruction:\n{row['instruction']}\n\n"
    task += f"### Input:\n{row['input']}\n\n" if row["input"] else ""
    return Example(task + "### Response:\n", row["output"])


def gsm8k(options: Options) -> Splits:
    """GSM8K with its own test set."""
    folder = folder_of("gsm8k", options)
    hub = from_hub("gsm8k") if folder is None else {}
    train, test = (
        _examples(_read_jsonl(folder / f"{split}.jsonl") if folder else hub[split], gsm8k_example, folder)
        for split in ("train", "test")
    )
    return {**_divide(train, has_test=True), "test": test}


def gsm8k_example(row: Row) -> Example:
    r"""The answer as published: its steps, the calculator's notes, and the result after ``####``.

    >>> gsm8k_example({"question": "1 + 2?", "answer": "#### 3"})
    Example(prompt='Question: 1 + 2?\nAnswer: ', response='#### 3')
    """
    return Example(f"Question: {row['question']}\nAnswer: ", row["answer"])


def embedded(_: Options) -> Splits:
    """Given a paragraph of Python's language reference (the text behind ``help()``), write the next.

    Paragraphs that occur twice are kept once, and whole sections are held out, so that no held-out text is seen in
    training, not even as a prompt. The text differs a little from one version of Python to another.
    """
    from pydoc_data.topics import topics

    paragraphs = dict.fromkeys(text.strip() for key in sorted(topics) for text in topics[key].split("\n\n"))
    long = [text for text in paragraphs if len(text) >= _SHORTEST]
    splits: Splits = {"train": [], "validation": [], "test": []}
    for number, start in enumerate(range(0, len(long), _SECTION)):
        section = long[start : start + _SECTION]
        split: Split = {8: "validation", 9: "test"}.get(number % 10, "train")  # type: ignore[assignment]
        splits[split] += [Example(f"{before}\n\n", after) for before, after in pairwise(section)]
    return splits


DATASETS: dict[str, Callable[[Options], Splits]] = {"alpaca": alpaca, "gsm8k": gsm8k, "embedded": embedded}


def _divide(examples: Iterable[Example], *, has_test: bool = False) -> Splits:
    splits: Splits = {"train": [], "validation": [], "test": []}
    for example in examples:
        splits[split_of(example.prompt.encode(), one_in=20, has_test=has_test)].append(example)
    return splits


def _examples(rows: Iterable[Row], convert: Callable[[Row], Example], folder: Path | None) -> list[Example]:
    examples = []
    for number, row in enumerate(rows):
        try:
            examples.append(convert(row))
        except (KeyError, TypeError) as error:
            where = str(folder) if folder else "the hub's copy"
            raise WorkloadError(f"example {number} of {where} cannot be read: {error!r} in {str(row)[:80]}") from None
    return examples


def _only(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern))
    if len(found) == 1:
        return found[0]
    names = ", ".join(path.name for path in found) or "none"
    raise missing(folder.name, f"{str(folder)!r} should hold one {pattern} and holds {names}")


def _read_json(path: Path) -> list[Row]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise WorkloadError(f"{str(path)!r} is not JSON: {error}.") from None
    if not isinstance(rows, list):
        raise WorkloadError(f"{str(path)!r} holds a {type(rows).__name__}, not a list of examples.")
    return rows


def _read_jsonl(path: Path) -> list[Row]:
    if not path.is_file():
        raise missing(path.parent.name, f"there is no file {str(path)!r}")
    rows = []
    with path.open(encoding="utf-8") as lines:  # not splitlines(), which also cuts at line separators inside strings
        numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    for number, line in numbered:
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise WorkloadError(f"{str(path)!r}, line {number} is not JSON: {error}.") from None
    return rows
