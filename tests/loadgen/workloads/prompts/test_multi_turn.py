import itertools

from loadgen.workloads.lengths import Independent, Lengths
from loadgen.workloads.prompts.installed import GeneratedLoad
from loadgen.workloads.prompts.multi_turn import MultiTurn
from loadgen.workloads.prompts.prompt import ServerLimits
from loadgen.workloads.prompts.vocabulary import calibrate


def words(text):
    return 1 + len(text.split())


def sessions(limits=None, is_cold=False):
    lengths = Independent(Lengths.parse("10"), Lengths.parse("5"))
    load = GeneratedLoad(calibrate(words), lengths, limits or ServerLimits(), 0, "0", is_cold)
    return MultiTurn(load, Lengths.parse("3"))


def test_every_turn_repeats_the_conversation_and_adds_answer_and_question():
    first, second, third = sessions().session(0)

    assert [words(prompt.text) for prompt in (first, second, third)] == [10, 25, 40]
    assert second.text.startswith(first.text)
    assert third.text.startswith(second.text)
    assert [message["role"] for message in third.messages] == ["user", "assistant", "user", "assistant", "user"]
    assert "".join(message["content"] for message in third.messages) == third.text


def test_turns_of_a_session_follow_one_another():
    prompts = list(itertools.islice(sessions(), 6))

    assert [(prompt.turn, prompt.turns_left) for prompt in prompts] == [(0, 2), (1, 1), (2, 0)] * 2
    assert [prompt.session_id for prompt in prompts] == ["multi_turn-0-0"] * 3 + ["multi_turn-0-1"] * 3


def test_a_conversation_beyond_the_servers_limits_is_clipped_and_counted():
    third = list(sessions(ServerLimits(max_input_tokens=30)).session(0))[2]

    assert (third.planned_input_tokens, third.input_tokens, words(third.text)) == (40, 30, 30)


def test_cold_turns_share_no_prefix():
    texts = [prompt.text for prompt in sessions(is_cold=True).session(0)]

    assert len({tuple(text.split()[:7]) for text in texts}) == 3
    assert [words(text) for text in texts] == [10, 25, 40]
