"""Text of an exact token length, composed of words with known token counts.

Only needs a function that counts tokens. `calibrate` finds words whose token count does not depend on the word before
them, so that any composition has a known length. `Vocabulary.write` composes texts.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

CountTokens = Callable[[str], int]

CANDIDATE_TEXT = """
the of and to in is it you that he was for on are with as his they be at one have this from or had by hot but
some what there we can out other were all your when up use word how said an each she which do their time if will
way about many then them would write like so these her long make thing see him two has look more day could go
come did my sound no most number who over know water than call first people may down side been now find any new
work part take get place made live where after back little only round man year came show every good me give our
under name very through just form much great think say help low line before turn cause same mean differ move
right boy old too does tell sentence set three want air well also play small end put home read hand port large
spell add even land here must big high such follow act why ask men change went light kind off need house picture
try us again animal point mother world near build self earth father head stand own page should country found
answer school grow study still learn plant cover food sun four thought let keep eye never last door between city
tree cross since hard start might story saw far sea draw left late run while press close night real life few
stop a b c d e f g h i j k l m n o p q r s t u v w x y z 0 1 2 3 4 5 6 7 8 9
"""
CANDIDATES = tuple(CANDIDATE_TEXT.split())
FILLERS = (" a", " 1", "!", ".", "x", "~", "a", "1")
MAX_WORDS = 256
MAX_OPENERS = 16
# Maximum tokens of a word, if the vocabulary has too few words of one token.
MAX_WORD_TOKENS = 8
MIN_WORDS = 32
STABLE_ORDERS = 3
MAX_ORDERS = 48
# Words that are counted at once where each count is a request, and the smallest such group.
SPARE_GROUP, SMALLEST_GROUP = 64, 4
# Tokens per word from which a tokenizer splits most words; then this number of words is counted, each alone.
SPLIT_WORDS, FEW_WORDS = 1.5, 12


class CalibrationError(Exception):
    """No composition of words keeps its length under this tokenizer."""


@dataclass(frozen=True, slots=True)
class Word:
    text: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A text is one opener, then words, then fillers (one token each) where no word fits.

    `special_tokens` is the number of tokens that the tokenizer adds to any text.
    """

    special_tokens: int
    openers: tuple[Word, ...]
    words: tuple[Word, ...]
    filler: str

    @property
    def shortest(self) -> int:
        """The smallest possible number of tokens of a text."""
        return self.special_tokens + min(opener.tokens for opener in self.openers)

    def write(self, tokens: int, key: str) -> str:
        """A text of exactly `tokens` tokens, including special ones (or of `shortest`, if that is more).

        Equal keys and lengths give equal texts.
        """
        rng = random.Random(key)
        room = tokens - self.special_tokens
        openers = [opener for opener in self.openers if opener.tokens <= room]
        opener = rng.choice(openers) if openers else min(self.openers, key=lambda each: each.tokens)
        return opener.text + self.continue_text(room - opener.tokens, rng)

    def compose(self, parts: Iterable[tuple[int, str]], tokens: int) -> list[str]:
        """Pieces of a text of `tokens` tokens (or of `shortest`, if that is more), cut from parts of (tokens, key).

        Texts whose leading parts are equal begin with the same words. Special tokens count into the first part.
        """
        pieces: list[str] = []
        left = max(tokens, self.shortest)
        for size, key in parts:
            take = min(left, size if pieces else max(size, self.shortest))
            if take > 0:
                pieces.append(self.continue_text(take, random.Random(key)) if pieces else self.write(take, key))
                left -= take
        return pieces

    def continue_text(self, tokens: int, rng: random.Random) -> str:
        """Words of `tokens` tokens in total that continue a text."""
        if tokens <= 0:
            return ""
        largest = max(word.tokens for word in self.words)
        if largest == 1:
            return "".join(word.text for word in rng.choices(self.words, k=tokens))
        pieces: list[str] = []
        while tokens > largest:
            word = rng.choice(self.words)
            pieces.append(word.text)
            tokens -= word.tokens
        return "".join(pieces) + self.filler * tokens


def calibrate(count: CountTokens) -> Vocabulary:
    """The vocabulary of a tokenizer, from a function that counts tokens. Raises CalibrationError."""
    special = count("")
    openers = _openers(count, special)
    base = openers[0]
    costs = {word: count(base.text + " " + word) - special - base.tokens for word in CANDIDATES}
    single = [Word(" " + word, 1) for word, cost in costs.items() if cost == 1][:MAX_WORDS]
    single = _composable(count, special, base, single)
    if len(single) >= MIN_WORDS:
        return Vocabulary(special, openers, tuple(single), single[0].text)
    cheap = [Word(" " + word, cost) for word, cost in costs.items() if 1 <= cost <= MAX_WORD_TOKENS][:MAX_WORDS]
    cheap = _composable(count, special, base, cheap)
    for filler in FILLERS:
        if cheap and _fills(count, special, base, cheap[0], filler):
            return Vocabulary(special, openers, tuple(cheap), filler)
    if single:
        return Vocabulary(special, openers, tuple(single), single[0].text)
    raise CalibrationError("no words keep their token count next to each other with this tokenizer")


def calibrate_sparingly(count: CountTokens) -> Vocabulary:
    """A vocabulary from few counts: words of one token, whole groups of which are counted at once.

    A tokenizer that splits most words has few words, each counted alone. Raises CalibrationError if the words do not
    keep their counts next to each other, or no text fills the last tokens.
    """
    base = Word(CANDIDATES[0], 1)
    special = count(base.text) - base.tokens
    groups = [CANDIDATES[start : start + SPARE_GROUP] for start in range(1, len(CANDIDATES), SPARE_GROUP)]
    first = count(base.text + "".join(f" {word}" for word in groups[0])) - special - base.tokens
    if first > SPLIT_WORDS * len(groups[0]):
        return _few_words(count, special, base)
    words = [word for group in groups for word in _single_words(count, special, base, group)]
    together = base.text + "".join(word.text for word in words)
    if len(words) < MIN_WORDS or count(together) != special + base.tokens + len(words):
        raise CalibrationError("too few words have one token each next to the others")
    return Vocabulary(special, (base,), tuple(words), words[0].text)


def _few_words(count: CountTokens, special: int, base: Word) -> Vocabulary:
    """Words of several tokens, each counted alone. Raises CalibrationError."""
    texts = [f" {word}" for word in CANDIDATES[1 : 1 + FEW_WORDS]]
    words = [Word(text, count(base.text + text) - special - base.tokens) for text in texts]
    expected = special + base.tokens + sum(word.tokens for word in words)
    if min(word.tokens for word in words) < 1 or count(base.text + "".join(texts)) != expected:
        raise CalibrationError("words do not keep their token count next to each other")
    for filler in FILLERS:
        if count(base.text + words[0].text + filler * FEW_WORDS) == special + base.tokens + words[0].tokens + FEW_WORDS:
            return Vocabulary(special, (base,), tuple(words), filler)
    raise CalibrationError("no text adds exactly one token for each repetition")


def _single_words(count: CountTokens, special: int, base: Word, group: Sequence[str]) -> list[Word]:
    """The words of a group, if its text has one token for each of them; else those of its halves, down to a few."""
    words = [Word(" " + word, 1) for word in group]
    if count(base.text + "".join(word.text for word in words)) == special + base.tokens + len(words):
        return words
    if len(group) < 2 * SMALLEST_GROUP:
        return []
    half = len(group) // 2
    return [word for part in (group[:half], group[half:]) for word in _single_words(count, special, base, part)]


def _openers(count: CountTokens, special: int) -> tuple[Word, ...]:
    """Words that may begin a text, with the fewest tokens."""
    found: list[Word] = []
    for text in CANDIDATES[:64] + CANDIDATES[-36:]:
        tokens = count(text) - special
        if tokens >= 1:
            found.append(Word(text, tokens))
        if sum(word.tokens == 1 for word in found) >= MAX_OPENERS:
            break
    if not found:
        raise CalibrationError("this tokenizer counts no tokens for any word")
    fewest = min(word.tokens for word in found)
    return tuple(word for word in found if word.tokens == fewest)[:MAX_OPENERS]


def _composable(count: CountTokens, special: int, base: Word, words: Sequence[Word]) -> list[Word]:
    """The words that keep their counts next to each other, in `STABLE_ORDERS` random orders in a row."""
    rng = random.Random("calibrate")
    remaining = list(words)
    stable = 0
    for _ in range(MAX_ORDERS):
        rng.shuffle(remaining)
        before = len(remaining)
        remaining = _keeping_count(count, special, base, remaining)
        stable = stable + 1 if len(remaining) == before else 0
        if stable == STABLE_ORDERS:
            return sorted(remaining, key=lambda word: word.text)
    return []


def _keeping_count(count: CountTokens, special: int, base: Word, words: list[Word]) -> list[Word]:
    """The words in this order, without neighbours whose tokens merge."""
    expected = special + base.tokens + sum(word.tokens for word in words)
    if not words or count(base.text + "".join(word.text for word in words)) == expected:
        return words
    if len(words) == 1:
        return []
    half = len(words) // 2
    left = _keeping_count(count, special, base, words[:half])
    right = _keeping_count(count, special, base, words[half:])
    if len(left) + len(right) == len(words):
        # Each half has its count, so the two words at the boundary merge.
        return left[:-1] + right[1:]
    return left + right


def _fills(count: CountTokens, special: int, base: Word, word: Word, filler: str) -> bool:
    """Whether each repetition of the filler after a word adds exactly one token."""
    before = special + base.tokens + word.tokens
    return all(
        count(base.text + word.text + filler * number) == before + number for number in range(1, MAX_WORD_TOKENS + 1)
    )
