"""Named loads in a study."""

from tuner.config import TuneConfig
from tuner.study.prepare_study import load_of


def test_servers_6_the_profile_of_a_studys_load_overrides_the_studys_default_load() -> None:
    load = load_of(TuneConfig.model_validate({"load": {"profile": "chat", "output_tokens": "8"}}))

    assert (load.workload, load.turns, load.output_tokens) == ("multi_turn", "uniform:2,6", "8")
    assert load.input_tokens == "lognormal:60,0.8"


def test_a_study_of_a_file_of_prompts_needs_no_prompt_length() -> None:
    load = load_of(TuneConfig.model_validate({"load": {"workload": "prompts", "prompts_file": "p.jsonl"}}))

    assert (load.input_tokens, load.output_tokens, load.concurrency) == (None, "32", 16)
