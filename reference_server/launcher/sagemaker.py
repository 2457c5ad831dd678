"""The entry point for SageMaker: the launcher on port 8080, with the platform's variables.

    python -m reference_server.launcher.sagemaker

SageMaker starts a container with the word `serve`, and calls `/ping` and `/invocations`. Matches TGI's
sagemaker-entrypoint.sh: SageMaker's variables override the launcher's.
"""

import sys
from collections.abc import Mapping, Sequence

from reference_server.configuration.settings import process_environment
from reference_server.launcher.cli import main as launch

PORT = "8080"
VARIABLES: Mapping[str, str] = {
    "HF_MODEL_ID": "MODEL_ID",
    "HF_MODEL_REVISION": "REVISION",
    "SM_NUM_GPUS": "NUM_SHARD",
    "HF_MODEL_QUANTIZE": "QUANTIZE",
    "HF_MODEL_TRUST_REMOTE_CODE": "TRUST_REMOTE_CODE",
}
"""SageMaker's variables and the launcher's."""


def main(argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> int:
    """Run the launcher with `argv`, without the word `serve`; returns its exit code, or 1 without HF_MODEL_ID."""
    environ = process_environment() if environ is None else environ
    if not environ.get("HF_MODEL_ID"):
        sys.stderr.write("Error: ArgumentValidation: HF_MODEL_ID must be set\n")
        return 1
    words = sys.argv[1:] if argv is None else argv
    return launch(["--port", PORT, *(word for word in words if word != "serve")], launcher_environment(environ))


def launcher_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of the launcher: SageMaker's under the launcher's names. HF_MODEL_TRUST_REMOTE_CODE may be `1`."""
    found = {VARIABLES[name]: value for name, value in environ.items() if name in VARIABLES and value}
    if found.get("TRUST_REMOTE_CODE") in ("1", "0"):
        found["TRUST_REMOTE_CODE"] = "true" if found["TRUST_REMOTE_CODE"] == "1" else "false"
    return {name: value for name, value in environ.items() if name not in VARIABLES} | found


if __name__ == "__main__":
    sys.exit(main())
