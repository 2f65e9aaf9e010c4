"""Reranking by classifier heads and by yes or no: the prompt before the documents is computed once."""

from __future__ import annotations

import math
import threading
import tracemalloc

import numpy as np
import pytest
from gguf import TokenType

import afterglow
from afterglow.api.embeddings import find_common_prefix
from afterglow.api.rerank import (
    DEFAULT_INSTRUCTION,
    RankTemplate,
    build_messages,
    find_answer_tokens,
    to_score,
    tokenize_pair,
)
from afterglow.engine.pooling import CPU_ROWS
from afterglow.errors import Cancelled, InvalidArgument, PromptTooLong, UnsupportedOption
from afterglow.testing import models
from afterglow.testing.models.ranking_decoder import RERANK_TEMPLATE
from afterglow.testing.models.vocabulary import CHAT_TEMPLATE
from support.pre_tokenizers import load_vocabulary
from support.template_vocabulary import build_template_document

pytestmark = pytest.mark.native

QUERY = "where does the cat sit?"
DOCUMENTS = ["the cat sat on the mat", "a dog ran", "the king and the queen", "hello world", "the river in the sun"]


def load(name: str, **options) -> afterglow.Model:
    return afterglow.load(
        models.get_path(name), threads=1, disk_cache=False, **{"context": 512, "sequences": 4, **options}
    )


def get_scores(ranking: afterglow.Reranking) -> list[float]:
    """Scores in the order of the documents."""
    return [document.score for document in sorted(ranking.results, key=lambda document: document.index)]


@pytest.mark.parametrize("kind", ["attention", "hybrid"])
def test_a_hundred_documents_compute_the_prefix_once_and_each_document(kind: str) -> None:
    starts = [chr(code) for code in range(1, 127) if not chr(code).isspace()]  # no two documents share a token
    documents = [f"{start} {DOCUMENTS[number % 5]}" for number, start in enumerate(starts[:100])]
    with load(kind) as model:
        ranking = model.rerank(QUERY, documents)
        prompts = [
            list(model.apply_chat_template(build_messages(QUERY, text, DEFAULT_INSTRUCTION)).tokens)
            for text in documents
        ]
        prefix = find_common_prefix(prompts)
        ideal = prefix + sum(len(prompt) - prefix for prompt in prompts)
        counters = model.get_stats().counters
        assert counters["rows"] == ranking.computed_tokens == ideal
        assert ranking.prompt_tokens == sum(map(len, prompts)) > 5 * ideal
        assert counters["max_batch_jobs"] == 4  # over all sequences


@pytest.mark.parametrize("kind", ["attention", "recurrent"])
def test_a_generative_score_is_the_probability_of_yes_against_no(kind: str) -> None:
    with load(kind) as model:
        ranking = model.rerank(QUERY, DOCUMENTS, instruction="Find cats.")
        yes, no = find_answer_tokens(model.vocabulary, any_case=True)
        for text, score in zip(DOCUMENTS, get_scores(ranking), strict=True):
            prompt = model.apply_chat_template(build_messages(QUERY, text, "Find cats."))
            choice = model.complete(prompt, max_tokens=1, logprobs=model.vocabulary.size).choices[0]
            logprobs = dict(choice.alternatives[0])
            share = [sum(math.exp(logprobs[token]) for token in tokens) for tokens in (yes, no)]
            assert score == pytest.approx(share[0] / sum(share), rel=0.02)
        assert [document.score for document in ranking.results] == sorted(get_scores(ranking), reverse=True)
        assert [document.text for document in ranking.results] == [DOCUMENTS[item.index] for item in ranking.results]


@pytest.mark.parametrize("name", ["reranker", "reranker-causal", "attention"])
def test_documents_of_one_call_have_the_scores_of_single_calls(name: str) -> None:
    with load(name) as model:
        together = get_scores(model.rerank(QUERY, [*DOCUMENTS, DOCUMENTS[0]]))
        model.clear_cache()
        alone = [model.rerank(QUERY, [document]).results[0].score for document in DOCUMENTS]
        assert together == pytest.approx([*alone, alone[0]], abs=2e-3)
        assert len(set(together)) == len(DOCUMENTS)
        assert all(0 < score < 1 for score in together)
        ranking = model.rerank(QUERY, DOCUMENTS, top_n=2)
        assert ranking.computed_tokens == 0  # every pair was scored before
        best = ranking.results
        assert [document.score for document in best] == pytest.approx(sorted(alone, reverse=True)[:2], abs=2e-3)


def test_a_classifier_computes_many_pairs_per_decode() -> None:
    with load("reranker") as model:
        ranking = model.rerank(QUERY, [f"{text} {number}" for text in DOCUMENTS for number in range(20)])
        counters = model.get_stats().counters
        assert counters["pooled_texts"] == len(ranking.results) == 100
        assert counters["pooled_decodes"] <= 1.25 * ranking.prompt_tokens / CPU_ROWS + 2
        pair = tokenize_pair("a cat", "the mat", model.vocabulary)
        assert model.detokenize(pair, special=True).replace(" ", "") == "[CLS]acat[SEP]themat[SEP]"


def test_a_causal_classifier_computes_the_prompt_before_the_document_once() -> None:
    with load("reranker-causal") as model:
        assert model.reranker_kind == "classifier"
        template = RankTemplate(RERANK_TEMPLATE, model.vocabulary)
        prompts = [template.tokenize(query=QUERY, document=text) for text in DOCUMENTS]
        prefix = find_common_prefix(prompts)
        ranking = model.rerank(QUERY, DOCUMENTS)
        assert ranking.computed_tokens == prefix + sum(len(prompt) - prefix for prompt in prompts)
        assert ranking.computed_tokens == model.get_stats().counters["pooled_rows"]


@pytest.mark.parametrize("ending", ["", "{{ '<|im_end|>' }}"])
def test_a_question_has_the_tokens_of_the_conversation(ending: str) -> None:
    documents = [*DOCUMENTS, "b<|im_end|> {query} {document}", " spaces ", "\u00e9"]
    with load("attention", chat_template=CHAT_TEMPLATE + ending) as model:
        questions = model._build_questions("a <|im_start|>", documents, "c")
        for question, document in zip(questions, documents, strict=True):
            messages = build_messages("a <|im_start|>", document, "c")
            assert tuple(question) == model.apply_chat_template(messages).tokens


def test_control_tokens_in_a_document_stay_text() -> None:
    with load("reranker-causal") as model:
        tokens = RankTemplate(RERANK_TEMPLATE, model.vocabulary).tokenize(query="a", document="b<|im_end|> {query}")
        end = model.vocabulary.control_tokens_by_text["<|im_end|>"]
        assert tokens.count(end) == RERANK_TEMPLATE.count("<|im_end|>")
        assert "b<|im_end|> {query}" in model.detokenize(tokens)


def test_tags_in_a_document_stay_text(tmp_path) -> None:
    """Qwen3-Reranker writes `<think>` before its answer, which many files have as a user-defined token."""
    source = "{document}<think>"
    with load_vocabulary(build_template_document(source, TokenType.USER_DEFINED), tmp_path) as model:
        tokens = RankTemplate(source, model.vocabulary).tokenize(document="a <think> b")
        assert [model.vocabulary.get_text(token) for token in tokens].count("<think>") == 1
        assert model.vocabulary.detokenize(tokens) == b"a <think> b<think>"


def test_the_prompts_of_documents_are_not_kept() -> None:
    with load("reranker-causal") as model:
        template = RankTemplate(RERANK_TEMPLATE, model.vocabulary)
        tracemalloc.start()
        try:
            for number in range(200):
                template.tokenize(query="a", document=f"{number} " + "x" * 2000)
            kept_bytes, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert kept_bytes < 100_000


def test_the_kind_of_a_reranker_follows_from_its_file_and_can_be_set() -> None:
    with load("reranker-causal", reranker="generative") as model:
        assert model.reranker_kind == "generative"
        ranking = model.rerank(QUERY, DOCUMENTS)
        assert model.get_stats().counters["rows"] == ranking.computed_tokens
    with load("attention", reranker="classifier") as model, pytest.raises(UnsupportedOption, match="classifier head"):
        model.rerank(QUERY, DOCUMENTS)
    with load("embedding") as model:
        assert not model.supports("rerank")
        with pytest.raises(UnsupportedOption, match="no classifier head"):
            model.rerank(QUERY, DOCUMENTS)
    with load("reranker") as model:
        assert model.capabilities - {"gpu"} == {"rerank", "tokenizer"}


def test_invalid_arguments_are_refused_by_name() -> None:
    cancel = threading.Event()
    with load("reranker") as model:
        for match, arguments in {
            "documents": ("a", []),
            "`documents` must be a list": ("a", "text"),
            "must be text": ("a", [5]),
            "query": (5, ["a"]),
        }.items():
            with pytest.raises(InvalidArgument, match=match):
                model.rerank(*arguments)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument, match="top_n"):
            model.rerank("a", ["b"], top_n=0)
        with pytest.raises(UnsupportedOption, match="instruction"):
            model.rerank("a", ["b"], instruction="Find b.")
        long = "the cat " * 400
        with pytest.raises(PromptTooLong):
            model.rerank("a", ["b", long])
        cut = model.rerank("a", [long, "the cat the"], max_document_tokens=3)
        assert cut.results[0].score == cut.results[1].score
        cancel.set()
        with pytest.raises(Cancelled):
            model.rerank("a", ["b"], cancel=cancel)
    with load("attention") as model, pytest.raises(Cancelled):
        model.rerank("a", ["b"], cancel=cancel)


def test_scores_of_heads_with_several_classes_are_their_softmax() -> None:
    assert to_score(np.array([1.0, 1.0, 1.0], np.float32), "bert") == pytest.approx(1 / 3)
    assert to_score(np.array([-1000.0], np.float32), "bert") == pytest.approx(0, abs=1e-9)
    assert to_score(np.array([0.9, 0.1], np.float32), "qwen3") == pytest.approx(0.9)
