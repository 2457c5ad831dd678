import pytest

from tests.tuner.studies import FormulaServer, open_search
from tuner.study.confirm import confirm, judge
from tuner.study.search import best_of
from tuner.study.worker import run_search
from tuner.trial.objective import Objective
from tuner.trial.outcome import TrialResult

TOKENS = Objective("output_tokens_per_s")


def runs(number, *values, violation=-0.5):
    return [TrialResult(number, {}, "measured", value=value, violations={"a <= 1": violation}) for value in values]


BASE, BEST, OTHER = (TrialResult(number, {}, "measured", value=1.0) for number in (0, 1, 2))


def test_a_clear_gain_is_confirmed_with_its_interval():
    fresh = {0: runs(0, 100.0, 101.0, 99.0), 1: runs(1, 120.0, 121.0, 119.5)}

    confirmation = judge(TOKENS, BASE, [BEST], fresh)

    assert confirmation.winner is BEST
    assert confirmation.gain is not None
    assert confirmation.gain.lo > 1.15
    assert confirmation.sentence.startswith("trial 1 is better than the defaults: +20.")


def test_a_gain_within_noise_keeps_the_defaults():
    fresh = {0: runs(0, 100.0, 120.0, 90.0), 1: runs(1, 105.0, 100.0, 125.0)}

    confirmation = judge(TOKENS, BASE, [BEST], fresh)

    assert confirmation.winner is BASE
    assert confirmation.sentence.startswith("defaults are as good")


def test_one_round_confirms_nothing():
    confirmation = judge(TOKENS, BASE, [BEST], {0: runs(0, 100.0), 1: runs(1, 150.0)})

    assert confirmation.winner is BASE
    assert confirmation.sentence.startswith("keep the defaults: one round gives no interval")


def test_a_finalist_with_one_failed_launch_cannot_win():
    fresh = {0: runs(0, 100.0, 100.0, 100.0), 1: runs(1, 150.0, None, 150.0), 2: runs(2, 110.0, 111.0, 110.5)}

    assert judge(TOKENS, BASE, [BEST, OTHER], fresh).winner is OTHER


def test_a_finalist_that_misses_a_limit_cannot_win():
    fresh = {0: runs(0, 100.0, 100.0, 100.0), 1: runs(1, 150.0, 151.0, 150.0, violation=0.2)}

    confirmation = judge(TOKENS, BASE, [BEST], fresh)

    assert confirmation.winner is BASE
    assert confirmation.sentence == "keep the defaults: no finalist meets every limit in its confirming launches"


def test_there_is_no_winner_if_no_configuration_meets_the_limits():
    fresh = {0: runs(0, 100.0, violation=0.2), 1: runs(1, 150.0, violation=0.2)}

    assert judge(TOKENS, BASE, [BEST], fresh).winner is None


def test_failed_confirming_launches_are_reported_instead_of_limits():
    confirmation = judge(TOKENS, BASE, [BEST], {0: runs(0, None), 1: runs(1, 120.0, None)})

    assert confirmation.winner is None
    assert confirmation.sentence == "a confirming launch failed for the defaults and for every finalist"


@pytest.mark.parametrize("rounds", [2, 3])
def test_finalists_and_defaults_alternate_and_are_not_launched_again(tmp_path, rounds):
    server = FormulaServer()
    search = open_search(tmp_path / "s", server, trials=6)
    results = run_search(search)
    server.launches.clear()

    finalists = best_of(results, TOKENS)[:2]
    first = confirm(search, results[0], finalists, rounds)
    launched = [settings.get("max_batch_prefill_tokens") for settings in server.launches]
    again = confirm(search, results[0], finalists, rounds)

    one, two = (trial.settings["max_batch_prefill_tokens"] for trial in finalists)
    assert launched == [None, one, two, two, one, None, None, one, two][: 3 * rounds]
    assert len(server.launches) == 3 * rounds
    assert again == first
