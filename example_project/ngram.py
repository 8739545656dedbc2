"""A word n-gram language model: what answers the questions put to the demo.

Pure and deterministic: the same text, prompt and seed give the same tokens everywhere. The tokens
of an answer, joined, are its text: a token carries the space before it.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

Context = tuple[str, ...]

ORDER = 2  # words of context: a trigram's first two
SOON = 5  # words into a sentence at which a word of the topic is still soon
WANDER = 0.35  # how often a context with one known successor backs off anyway
TOPIC_WEIGHT = 10  # how much likelier a word of the prompt is than its counts say
COMMON_WORDS = 30  # the commonest words of the text say nothing about a topic, as do these:
QUESTION_WORDS = frozenset(
    [
        *("about", "can", "could", "did", "do", "does", "explain", "how", "is", "me", "please"),
        *("say", "tell", "what", "when", "where", "which", "who", "why", "will", "would", "your"),
    ]
)
OVERRUN = 60  # words beyond the length asked for that may go into ending the sentence

PARAGRAPH = "\n\n"
SENTENCE_ENDS = frozenset(".!?")
OPENERS, CLOSERS = "“(", "”)"

_WORD = re.compile(r"\w+(?:[’'-]\w+)*|[^\w\s]")
_CLINGS_LEFT = frozenset(".,;:!?)”’—")
_CLINGS_RIGHT = frozenset("“(‘—")


def split_words(text: str) -> list[str]:
    """Words, punctuation marks and `PARAGRAPH`s of `text`; lines that begin with # are left out."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    words: list[str] = []
    for paragraph in re.split(r"\n\s*\n", "\n".join(lines).strip()):
        if found := _WORD.findall(paragraph):
            words += [*found, PARAGRAPH]
    return words


def with_space(word: str, previous: str | None) -> str:
    """The token that writes `word` after `previous`: with a space in front where print has one."""
    if previous is None or PARAGRAPH in (word, previous):
        return word
    clings = word in _CLINGS_LEFT or previous in _CLINGS_RIGHT
    return word if clings else f" {word}"


class NgramModel:
    """Counts of which word follows two words, one word, and none: trigrams, bigrams, unigrams."""

    def __init__(self, text: str) -> None:
        """Train on `text`, paragraphs of which are separated by blank lines."""
        words = split_words(text)
        self.words_seen = len(words)
        self._followers: dict[Context, Counter[str]] = {}
        self._sentences: list[list[str]] = []
        for end in range(1, len(words)):
            for length in range(ORDER + 1):
                if length <= end:
                    context = _context(words[end - length : end])
                    self._followers.setdefault(context, Counter())[words[end]] += 1
        self._split_sentences(words)
        self._counts = Counter(word.casefold() for word in words)
        self._common = frozenset(word for word, _ in self._counts.most_common(COMMON_WORDS))

    def _split_sentences(self, words: list[str]) -> None:
        """Keep the sentences that can open an answer: those that begin as one does."""
        sentence: list[str] = []
        for word in words:
            sentence.append(word)
            if word in SENTENCE_ENDS or word == PARAGRAPH:
                if len(sentence) > ORDER and (sentence[0] == "“" or sentence[0][0].isupper()):
                    self._sentences.append(sentence)
                sentence = []

    def topic(self, prompt: str) -> frozenset[str]:
        """The prompt's words that the model knows and that say something, in lower case."""
        words = {word.casefold() for word in _WORD.findall(prompt) if word[0].isalnum()}
        return frozenset(word for word in words if word in self._counts) - self._common - QUESTION_WORDS

    def answer(self, prompt: str, *, seed: int, length: int) -> Iterator[str]:
        """Yield the tokens of an answer to `prompt`: about `length` of them, whole sentences.

        The answer opens as one of the text's sentences about the prompt's words does (rare words
        weigh most), and goes on with those words likelier than others.
        """
        rng = random.Random(seed)
        topic = self.topic(prompt)
        grammar = _Grammar()
        words: list[str] = []
        for word in self._words(rng, topic, grammar, words):
            yield with_space(word, words[-1] if words else None)
            grammar.add(word)
            words.append(word)
            if len(words) >= length and word in SENTENCE_ENDS:
                break
            if len(words) >= length + OVERRUN:
                yield "."
                break
        yield from grammar.still_open()

    def _words(
        self, rng: random.Random, topic: frozenset[str], grammar: _Grammar, words: list[str]
    ) -> Iterator[str]:
        yield from self._opening(rng, topic)
        while True:
            yield self._next_word(rng, topic, grammar, words)

    def _opening(self, rng: random.Random, topic: frozenset[str]) -> list[str]:
        """The beginning of a sentence, up to the first word of the topic if one has any."""
        openings = [_Opening(sentence, topic, self._counts) for sentence in self._sentences]
        good_enough = max(opening.score for opening in openings) / 2
        return rng.choice([o.words for o in openings if o.score >= good_enough])

    def _next_word(
        self, rng: random.Random, topic: frozenset[str], grammar: _Grammar, words: list[str]
    ) -> str:
        """Draw from the longest context seen in training, backing off to shorter ones."""
        for length in range(min(ORDER, len(words)), -1, -1):
            followers = self._followers.get(_context(words[len(words) - length :]), {})
            # A lone successor, always taken, would copy the book out.
            if length == ORDER and len(followers) == 1 and rng.random() < WANDER:
                continue
            allowed = [word for word in followers if grammar.allows(word)]
            if allowed:
                weights = [
                    followers[word] * (TOPIC_WEIGHT if word.casefold() in topic else 1) for word in allowed
                ]
                return rng.choices(allowed, weights)[0]
        raise ValueError("The model was trained on an empty text.")


class _Opening:
    """How a sentence can open an answer: more about the topic, and sooner, is better."""

    def __init__(self, sentence: list[str], topic: frozenset[str], counts: Counter[str]) -> None:
        found = [index for index, word in enumerate(sentence) if word.casefold() in topic]
        self.words = sentence[: max(ORDER, found[0] + 1 if found else 0)]
        rarity = sum(1 / counts[word] for word in {sentence[index].casefold() for index in found})
        self.score = rarity / (len(self.words) + SOON)


class _Grammar:
    """Keeps quotation marks and brackets in pairs, which word counts alone do not."""

    def __init__(self) -> None:
        self._open: list[str] = []
        self._last = PARAGRAPH

    def allows(self, word: str) -> bool:
        if word in OPENERS:
            return word not in self._open
        if word in CLOSERS:
            return bool(self._open) and self._open[-1] == _opener(word)
        if word in SENTENCE_ENDS or word == PARAGRAPH:
            return self._last != PARAGRAPH and not (word == PARAGRAPH and self._open)
        return word not in "‘’"

    def add(self, word: str) -> None:
        if word in OPENERS:
            self._open.append(word)
        elif word in CLOSERS and self._open:
            self._open.pop()
        self._last = word

    def still_open(self) -> Iterator[str]:
        """The closing marks that the text still owes."""
        for opener in reversed(self._open):
            yield CLOSERS[OPENERS.index(opener)]


def _opener(closer: str) -> str:
    return OPENERS[CLOSERS.index(closer)]


def _context(words: list[str]) -> Context:
    return tuple(word.casefold() for word in words)
