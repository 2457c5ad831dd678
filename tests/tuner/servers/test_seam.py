"""Only the package `tgi`, the simulator, the step probe and `fit` name settings of TGI."""

import re
from pathlib import Path

import tuner
from tuner.config import ServerSection
from tuner.servers.select import server_of

ROOT = Path(tuner.__file__).parent
# `fit` predicts the memory that the launcher would find on a GPU, so it has the launcher's flags. The step probe reads
# the limits of the bundled server, the only one with step traces, from its `/info`.
TGI_ROOMS = ("servers/tgi/", "simulator/", "commands/simulation/", "commands/fit.py", "trial/step_probe.py")


def test_no_other_module_of_the_tuner_names_a_setting_of_tgi():
    names = server_of(ServerSection()).known
    # Names that every server has, and words with another meaning where they occur.
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
