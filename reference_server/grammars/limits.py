"""Limits of a grammar: its size, and the time of its first steps, tried out over bytes."""

import random
import time
from functools import cache

import llguidance

from reference_server.errors import GenerationError, ValidationError
from reference_server.grammars.pool import MAX_STEP_NS

MAX_CHARACTERS = 65_536
MAX_REPETITIONS = 10_000
MAX_STATES = 50_000
#: Expressions that an automaton may build at its start, and in one step.
MAX_STEP_FUEL = 100_000
_NUM_TRIED_STEPS = 128
#: In llguidance's errors about a grammar that parses and is refused.
_LIMITS_REACHED = ("too big", "too large", "precomputation failed", "too many")


@cache
def parser_limits() -> llguidance.LLParserLimits:
    """For the trial and for generation: a grammar that grows beyond these limits ends its own request."""
    return llguidance.LLParserLimits(
        initial_lexer_fuel=MAX_STEP_FUEL, step_lexer_fuel=MAX_STEP_FUEL, max_lexer_states=MAX_STATES
    )


def check_regex(regex: str) -> None:
    """Raise ValidationError for a regex that is too large or too slow, GenerationError for one that does not parse."""
    check_size(regex)
    if (len(regex) - len(regex.rstrip("\\"))) % 2:
        # llguidance appends a slash, which this backslash would escape.
        raise GenerationError("grammar is not valid: incomplete escape sequence")
    check_grammar(llguidance.LLMatcher.grammar_from_regex(regex))


def check_grammar(grammar: str) -> None:
    """Try out llguidance's `grammar`. Raises as `check_regex`."""
    # Twice, in case the machine was slow.
    if _slowest_step_ns(grammar) > MAX_STEP_NS and (slowest := _slowest_step_ns(grammar)) > MAX_STEP_NS:
        raise too_complex(f"time: one step of its automaton takes {slowest // 1_000_000} ms")


def _slowest_step_ns(grammar: str) -> int:
    """The slowest of: starting its automaton, and the first steps of a random walk over bytes."""
    started = time.thread_time_ns()
    matcher = llguidance.LLMatcher(_bytes(), grammar, log_level=0, limits=parser_limits())
    if matcher.is_error():
        error = matcher.get_error()
        if any(words in error for words in _LIMITS_REACHED):
            raise too_complex(f"states: {_first_line(error)}")
        raise GenerationError(f"grammar is not valid: {parser_detail(error)}")
    times, rng = [time.thread_time_ns() - started], random.Random(0)
    for _ in range(_NUM_TRIED_STEPS):
        started = time.thread_time_ns()
        allowed = int.from_bytes(matcher.compute_bitmask(), "little")
        if matcher.is_error():
            raise too_complex(f"states: {_first_line(matcher.get_error())}")
        following = [byte for byte in range(256) if allowed >> byte & 1]
        if following:
            matcher.consume_token(rng.choice(following))
        times.append(time.thread_time_ns() - started)
        if not following:
            break
    return max(times)


def check_size(regex: str) -> None:
    """Check a regex without building anything. Raises ValidationError."""
    if len(regex) > MAX_CHARACTERS:
        raise too_complex(f"length: {len(regex)} of {MAX_CHARACTERS} characters")
    if repetitions(regex) > MAX_REPETITIONS:
        raise too_complex(f"counted repetitions: more than {MAX_REPETITIONS}")


def too_complex(limit: str) -> ValidationError:
    return ValidationError(f"grammar is not valid: too complex ({limit})")


def repetitions(regex: str) -> int:
    r"""The largest product of nested counted repetitions.

    >>> repetitions(r"(a{2}b{3,5}){10}\{99}[{8}]")
    50
    """
    # groups: for each open group, the largest product inside it. last: the product of the atom just read.
    groups, last, at = [1], 1, 0
    while at < len(regex):
        char = regex[at]
        at += 1
        if char == "\\":
            at += 1
            last = 1
        elif char == "[":
            at = _class_end(regex, at)
            last = 1
        elif char == "(":
            groups.append(1)
        elif char == ")":
            last = groups.pop() if len(groups) > 1 else 1
            groups[-1] = max(groups[-1], last)
        elif char == "{":
            count, at = _count(regex, at)
            last *= count
            groups[-1] = max(groups[-1], last)
        elif char not in "*+?":
            last = 1
    return max(groups)


def _class_end(regex: str, at: int) -> int:
    """The index after the bracket that closes a class. Classes nest."""
    depth = 1
    # A bracket at the start is a character.
    at += regex.startswith("^", at)
    at += regex.startswith("]", at)
    while at < len(regex) and depth:
        char = regex[at]
        at += 1 + (char == "\\")
        depth += (char == "[") - (char == "]")
    return at


def _count(regex: str, at: int) -> tuple[int, int]:
    """The greatest count of the repetition whose brace ends at `at`, and the index after it."""
    end = regex.find("}", at)
    low, _, high = regex[at:end].partition(",") if end >= 0 else ("", "", "")
    number = (high or low).strip()
    if not (number.isdecimal() and number.isascii()):
        return 1, at
    # Nine digits are above every limit.
    return max(1, int(number[:9])), end + 1


def parser_detail(error: str) -> str:
    """The parser's message without the grammar that surrounds it."""
    _, found, detail = error.partition("error: ")
    return _first_line(detail if found else error.partition("(in regex): ")[2] or error)


def _first_line(text: str) -> str:
    return text.partition("\n")[0]


class _ByteVocabulary:
    """One token for each byte."""

    eos_token_id = 256
    bos_token_id = None
    special_token_ids = (256,)
    tokens = (*(bytes([value]) for value in range(256)), b"<end>")

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


@cache
def _bytes() -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(_ByteVocabulary()))
