"""Reranking: scores of documents for a query, from a classifier head or from the probabilities of yes and no.

A generative reranker reads one prompt per document. The prompts share everything before the document, which is
prefilled once; each document is a fork of that prefix.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from afterglow.chat.control_tokens import TemplateTokenizer
from afterglow.errors import UnsupportedOption
from afterglow.llama.vocabulary import Vocabulary

DEFAULT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
SYSTEM_PROMPT = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
QUESTION = "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
PLACEHOLDERS = re.compile(r"\{(query|document|instruction)\}")
SOFTMAX_ARCHITECTURES = ("qwen3", "qwen3vl")  # llama.cpp applies the softmax of these classifier heads itself


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedDocument:
    """Score of one document, from 0 to 1. `index` is its place in the request.

    >>> document = model.rerank("What do cats eat?", ["Cats eat mice."]).results[0]
    >>> document.index, document.text, 0 < document.score < 1
    (0, 'Cats eat mice.', True)
    """

    index: int
    score: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reranking:
    """Documents of a query, the most relevant first.

    `prompt_tokens` counts the tokens of all pairs of query and document, `computed_tokens` those that were computed.

    >>> ranking = model.rerank("What do cats eat?", ["Cats eat mice.", "The engine is loud."])
    >>> len(ranking.results), ranking.computed_tokens < ranking.prompt_tokens
    (2, True)
    """

    results: tuple[RankedDocument, ...]
    prompt_tokens: int
    computed_tokens: int


def build_ranking(
    documents: Sequence[str], scores: Sequence[float], top_n: int | None, *, prompt_tokens: int, computed_tokens: int
) -> Reranking:
    """Sort documents by score; equal scores keep their order.

    >>> ranking = build_ranking(["a", "b", "c"], [0.1, 0.9, 0.1], 2, prompt_tokens=3, computed_tokens=3)
    >>> [(document.index, document.text) for document in ranking.results]
    [(1, 'b'), (0, 'a')]
    """
    order = sorted(range(len(documents)), key=lambda index: -scores[index])[:top_n]
    results = tuple(RankedDocument(index=index, score=scores[index], text=documents[index]) for index in order)
    return Reranking(results=results, prompt_tokens=prompt_tokens, computed_tokens=computed_tokens)


# --- prompts


def build_messages(query: str, document: str, instruction: str) -> list[tuple[str, str]]:
    """Return the conversation whose answer is yes or no, for models without a prompt of their own."""
    question = QUESTION.format(instruction=instruction, query=query, document=document)
    return [("system", SYSTEM_PROMPT), ("user", question)]


class RankTemplate:
    """Prompt with placeholders for the query, the document and the instruction.

    Control tokens are parsed in the template only: in the values they stay text.
    """

    def __init__(self, text: str, vocabulary: Vocabulary, start: Sequence[int] = ()) -> None:
        """`start` are tokens before the text."""
        self._tokenizer = TemplateTokenizer(vocabulary, text, cached_spans=0)  # documents are not repeated
        self._start = start
        self._spans = self._tokenizer.split(text)

    def tokenize(self, **values: str) -> list[int]:
        """Return the tokens of the prompt. Placeholders without a value stay text."""
        tokens = list(self._start)
        for span in self._spans:
            if isinstance(span, int):
                tokens.append(span)
            else:
                text = PLACEHOLDERS.sub(lambda match: values.get(match[1], match[0]), span)
                tokens += self._tokenizer.tokenize_client_text(text)
        return tokens


def tokenize_pair(query: str, document: str, vocabulary: Vocabulary) -> list[int]:
    """Tokenize a query and a document as cross-encoders expect them: start, query, separators, document, end."""
    bare, framed = vocabulary.tokenize("a"), vocabulary.tokenize("a", add_special=True)
    start_length = next(index for index in range(len(framed)) if framed[index : index + len(bare)] == bare)
    start, end = framed[:start_length], framed[start_length + len(bare) :]
    special = vocabulary.special_tokens
    names = (("eos", vocabulary.adds_eos), ("sep", vocabulary.adds_separator))
    between = [special[name] for name, is_added in names if is_added and name in special]
    return [*start, *vocabulary.tokenize(query), *(between or end), *vocabulary.tokenize(document), *end]


def find_answer_tokens(vocabulary: Vocabulary, *, any_case: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the first tokens of yes and of no; with `any_case`, also of Yes and No."""
    words = (("yes", "Yes"), ("no", "No")) if any_case else (("yes",), ("no",))
    yes, no = (tuple(dict.fromkeys(vocabulary.tokenize(word)[0] for word in group)) for group in words)
    if set(yes) & set(no):
        raise UnsupportedOption("model", "its tokens do not tell yes from no, so that it cannot rank documents")
    return yes, no


# --- scores


def to_score(outputs: NDArray[np.float32], architecture: str) -> float:
    """Return the relevance, from 0 to 1, that a classifier head computed. With several classes, the first is relevant.

    >>> to_score(np.array([0.0], np.float32), "bert"), to_score(np.array([0.75, 0.25], np.float32), "qwen3")
    (0.5, 0.75)
    """
    values = outputs.astype(np.float64)
    if architecture in SOFTMAX_ARCHITECTURES:
        return float(values[0])
    if len(values) == 1:
        return float(1 / (1 + math.exp(-max(-700.0, float(values[0])))))
    weights = np.exp(values - values.max())
    return float(weights[0] / weights.sum())


def compare_answers(logprobs: Mapping[int, float], yes: Sequence[int], no: Sequence[int]) -> float:
    """Return the probability of yes among yes and no.

    >>> round(compare_answers({1: math.log(0.3), 2: math.log(0.1)}, [1], [2]), 3)
    0.75
    """
    values = np.array([logprobs[token] for token in (*yes, *no)])
    weights = np.exp(values - values.max())
    return float(weights[: len(yes)].sum() / weights.sum())
