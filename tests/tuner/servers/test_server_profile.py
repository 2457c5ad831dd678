"""Profiles of servers: those in the package, and refusals that name file, key and limit."""

import re

import pytest

from loadgen.target.server_kind import KINDS
from tuner.config import ServerSection
from tuner.errors import SpaceError
from tuner.servers.find_profile import find_profile, shipped_profiles
from tuner.servers.select import server_of

MINIMAL = """
name = "mine"
command = "serve {model} --port {port}"
[setting.slots]
flag = "--slots"
type = "int"
low = 1
high = 8
default = 4
"""


def write(tmp_path, text):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("name", ["llamacpp", "sglang", "vllm"])
def test_every_shipped_profile_reads_and_explains_its_settings(name):
    profile = find_profile(name)

    assert name in shipped_profiles()
    assert profile.version
    assert {key for key, setting in profile.setting.items() if not setting.help} == set()


@pytest.mark.parametrize("name", ["llamacpp", "sglang", "vllm"])
def test_probes_use_the_route_that_is_polled_during_a_load(name):
    """SGLang's `/health` generates a token, and takes longer than a readiness probe waits."""
    manifest = server_of(ServerSection(profile=name, model_id="m")).export("k8s", {"model_id": "m"}, [])

    assert set(re.findall(r'path: "([^"]+)"', manifest)) == {KINDS[name].health_routes[0]}


def test_a_profile_of_ones_own_is_read_from_its_file(tmp_path):
    profile = find_profile(write(tmp_path, MINIMAL))

    assert profile.defaults == {"slots": 4}
    assert profile.setting["slots"].param().high == 8


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("{port}", "80"), r"mine.toml: .*`command` has no \{port\}"),
        (('type = "int"', 'type = "number"'), r"`setting.slots.type` is 'number'"),
        (("low = 1", "low = 9"), "needs `low` <= `high`"),
        (('flag = "--slots"', ""), "needs exactly one of `flag` and `env`"),
        (("default = 4", "defualt = 4"), "`setting.slots.defualt`"),
        (("default = 4", "[[forbid]]\nwhen = 'slots > batch'"), "reads `batch`, which is not a setting"),
        (("default = 4", "[[failure]]\nmatch = 'a('\ncause = 'memory'"), "not a regular expression"),
        (("default = 4", "[[failure]]\nmatch = 'a'\ncause = 'bored'"), r"`failure.0.cause` is 'bored'"),
        (("default = 4", "[facts]\nslots = 'no group'"), "has no group for its number"),
        (("[setting.slots]", "[setting.slots"), "not TOML"),
    ],
)
def test_a_faulty_profile_is_refused_with_its_file_key_and_rule(tmp_path, change, expected):
    with pytest.raises(SpaceError, match=expected):
        find_profile(write(tmp_path, MINIMAL.replace(*change)))


def test_an_installed_package_offers_a_profile_by_its_entry_point(tmp_path, monkeypatch):
    package = tmp_path / "mine-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(
        "[tgi_bench.servers]\nmine = mine_profiles:MINE\nodd = mine_profiles:ODD\n"
    )
    (tmp_path / "mine_profiles.py").write_text(
        f"from pathlib import Path\nMINE = Path({write(tmp_path, MINIMAL)!r})\nODD = 3\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    assert find_profile("mine").defaults == {"slots": 4}
    with pytest.raises(SpaceError, match="`mine_profiles:ODD` is int, not the path"):
        find_profile("odd")
    with pytest.raises(SpaceError, match="one of llamacpp, mine, odd, sglang, vllm"):
        find_profile("mime")


def test_an_unknown_profile_is_refused_with_the_known_names():
    with pytest.raises(SpaceError, match=r"must be a TOML file or one of llamacpp, sglang, vllm"):
        find_profile("vlmm")
