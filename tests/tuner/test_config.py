import pytest
from pydantic import ValidationError

from tuner.config import LimitSection, ParamSection, TuneConfig, study_name


def test_a_limit_has_exactly_one_bound():
    with pytest.raises(ValidationError, match="`ttft_p95_ms` needs exactly one"):
        LimitSection(metric="ttft_p95_ms")
    with pytest.raises(ValidationError, match="exactly one"):
        LimitSection(metric="ttft_p95_ms", max=1.0, min=2.0)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"type": "int", "low": 5, "high": 1}, "`low` <= `high`. Given: 5.0 and 1.0"),
        ({"type": "float", "low": 1}, "needs `low` <= `high`"),
        ({"type": "int", "low": 0, "high": 9, "log": True}, "`log` needs `low` > 0"),
        ({"type": "choice"}, "needs `values`"),
        ({"type": "bool", "low": 1}, "takes no `low`"),
        ({"type": "bool", "when": "import x"}, "not an expression"),
    ],
)
def test_an_incomplete_parameter_is_refused_with_the_reason(section, message):
    with pytest.raises(ValidationError, match=message):
        ParamSection(**section)


def test_unknown_keys_are_refused():
    with pytest.raises(ValidationError, match="trails"):
        TuneConfig.model_validate({"study": {"trails": 3}})


@pytest.mark.parametrize(
    ("model_id", "name"),
    [
        ("preset:tiny-llama", "tiny-llama-0123abcd"),
        ("meta/Llama 3", "Llama-3-0123abcd"),
        ("../..", "model-0123abcd"),
    ],
)
def test_a_study_is_named_after_its_model_and_digest(model_id, name):
    assert study_name(model_id, "0123abcdef") == name


@pytest.mark.parametrize(
    ("kind", "simulator", "uses_simulator"),
    [
        ("own", "auto", True),
        ("tgi-docker", "auto", True),
        ("command", "auto", False),
        ("command", "gp", True),
        ("own", "off", False),
    ],
)
def test_the_simulator_proposes_for_servers_with_known_traces_or_metrics(kind, simulator, uses_simulator):
    needed = {"tgi-docker": {"image": "tgi:3"}, "command": {"command": "serve --port {port}"}}
    server = {"kind": kind, **needed.get(kind, {})}

    assert (
        TuneConfig.model_validate({"study": {"simulator": simulator}, "server": server}).uses_simulator
        is uses_simulator
    )
