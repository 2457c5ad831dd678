"""Named loads in a study."""

from tuner.config import TuneConfig
from tuner.study.prepare_study import load_of


def test_servers_6_the_profile_of_a_studys_load_overrides_the_studys_default_load() -> None:
    load = load_of(TuneConfig.model_validate({"load": {"profile": "chat", "output_tokens": "8"}}))

    assert (load.workload, load.turns, load.output_tokens) == ("multi_turn", "uniform:2,6", "8")
    assert load.input_tokens == "lognormal:60,0.8"
