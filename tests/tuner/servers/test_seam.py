"""The seam between the tuner and a server: TGI's own room, the simulator and `fit` name TGI's settings."""

import re
from pathlib import Path

import tuner
from tuner.config import ServerSection
from tuner.servers.select import server_of

ROOT = Path(tuner.__file__).parent
# `fit` computes what the launcher would find on a GPU, so its flags are the launcher's.
TGI_ROOMS = ("servers/tgi/", "simulator/", "commands/simulate", "commands/fit.py")


def test_no_other_module_of_the_tuner_names_a_setting_of_tgi():
    names = server_of(ServerSection()).known
    # Names that every server has, and words that are no setting where they occur.
    words = {name for name in names if "_" in name} - {"model_id", "tuned_by", "api_key", "load_format"}
    flags = {word.replace("_", "-") for word in words}
    pattern = re.compile(rf"[\"`](?:{'|'.join(words)})[\"`]|--(?:{'|'.join(flags)})(?![a-z-])")
    found = {
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in ROOT.rglob("*.py")
        if not str(path.relative_to(ROOT)).startswith(TGI_ROOMS)
        for match in pattern.finditer(re.sub(r">>>.*", "", path.read_text()))
    }

    assert found == set()
