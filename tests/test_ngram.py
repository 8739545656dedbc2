"""The demo's language model: deterministic, conditioned on the prompt, well-formed text."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from example_project.answers import CORPUS
from example_project.ngram import NgramModel, split_words, with_space

PROMPTS = ["Why is a raven like a writing-desk?", "Tell me about cats.", "xyzzy 🐇", ""]


@pytest.fixture(scope="module")
def model() -> NgramModel:
    return NgramModel(CORPUS.read_text(encoding="utf-8"))


def text_of(model: NgramModel, prompt: str, *, seed: int = 1, length: int = 80) -> str:
    return "".join(model.answer(prompt, seed=seed, length=length))


def test_the_corpus_is_a_text_of_some_size_that_says_it_is_free():
    text = CORPUS.read_text(encoding="utf-8")
    assert "public domain" in text.split("\n\n")[0]
    assert len(text.encode()) >= 15_000


def test_words_marks_and_paragraphs_are_told_apart_and_comments_left_out():
    text = "# A title\n\n“Don’t!” she\nsaid—twice.\n\nThe tea-party."
    assert split_words(text) == [
        *["“", "Don’t", "!", "”", "she", "said", "—", "twice", ".", "\n\n"],
        *["The", "tea-party", ".", "\n\n"],
    ]


def test_tokens_carry_the_space_that_print_has_before_them():
    words = ["“", "Don’t", "!", "”", "she", "said", "—", "twice", ".", "\n\n", "The", "end"]
    pairs = zip(words, [None, *words[:-1]], strict=True)
    text = "".join(with_space(word, previous) for word, previous in pairs)
    assert text == "“Don’t!” she said—twice.\n\nThe end"


@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_same_prompt_and_seed_give_the_same_answer(model, prompt):
    other = NgramModel(CORPUS.read_text(encoding="utf-8"))
    assert text_of(model, prompt) == text_of(other, prompt)
    assert text_of(model, prompt) != text_of(model, prompt, seed=2)


def test_the_answers_of_a_small_text_are_the_sentences_that_its_trigrams_allow():
    model = NgramModel("The cat sat. The cat ran. A dog sat. The dog ran off.")
    answers = {text_of(model, "cat?", seed=seed, length=3) for seed in range(60)}
    subjects, verbs = ("The cat", "The dog", "A dog"), ("sat.", "ran.", "ran off.")
    assert answers <= {f"{subject} {verb}" for subject in subjects for verb in verbs}
    assert {"The cat sat.", "The cat ran."} <= answers


def test_an_answer_does_not_depend_on_the_process():
    """Set order differs from process to process; answers must not."""
    script = (
        "from pathlib import Path; from example_project.ngram import NgramModel;"
        f"model = NgramModel(Path({str(CORPUS)!r}).read_text(encoding='utf-8'));"
        f"print(ascii(''.join(model.answer({PROMPTS[0]!r}, seed=1, length=80))))"
    )
    answers = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2", "3")
    }
    assert len(answers) == 1


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("seed", range(10))
def test_an_answer_is_about_as_long_as_asked_and_well_formed(model, prompt, seed):
    tokens = list(model.answer(prompt, seed=seed, length=80))
    text = "".join(tokens)
    assert 80 <= len(tokens) <= 80 + 60 + 3
    assert text == text.strip()
    assert text.rstrip("”)")[-1] in ".!?"
    assert text.count("“") == text.count("”")
    assert text.count("(") == text.count(")")
    assert all(tokens)


@pytest.mark.parametrize("seed", range(5))
def test_an_answer_opens_with_the_prompts_rarest_word(model, seed):
    assert "treacle" in text_of(model, "Have you any treacle?", seed=seed)[:60].casefold()


def test_a_prompt_makes_its_words_likelier(model):
    def count(prompt: str) -> int:
        texts = (text_of(model, prompt, seed=seed, length=150) for seed in range(20))
        return sum(text[60:].count("Mouse") for text in texts)

    assert count("Where did the mouse go?") > 2 * count("What time is it?")


def test_an_unknown_context_backs_off_to_the_words_counts():
    model = NgramModel("One two. Three four.")
    assert text_of(model, "five", length=8).endswith(".")


def test_the_topic_leaves_out_common_and_unknown_words(model):
    assert model.topic("What did the Hatter say about the Dormouse, in Klingon?") == {
        "hatter",
        "dormouse",
    }
