"""`text-generation-launcher`: parse, plan, supervise.

Exit codes: 0 stopped by a signal, 1 failed (with an `Error: Kind` line on stderr), 2 usage.
"""

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Mapping, Sequence

from reference_server.configuration.config import ServerConfig
from reference_server.configuration.config_support import refuse_unsupported
from reference_server.configuration.ignored_variables import ignored_variables
from reference_server.configuration.settings import Loaded, load, process_environment
from reference_server.errors import StartupError
from reference_server.launcher.children import Programs
from reference_server.launcher.devices import probe_devices
from reference_server.launcher.environment import environment_report
from reference_server.launcher.log_relay import Scope
from reference_server.launcher.model_facts import ModelFacts, read_model_config
from reference_server.launcher.plan import LaunchPlan, NotEnoughDevicesError
from reference_server.launcher.signals import stop_signals
from reference_server.launcher.supervisor import LaunchError, PlannedLaunch, supervise
from reference_server.observability import LogFormat, set_up_logging

logger = logging.getLogger(__name__)


def main(
    argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None, programs: Programs | None = None
) -> int:
    """Run the launcher; `argv` and `environ` default to this process's, `programs` to those installed with it."""
    environ = process_environment() if environ is None else environ
    with stop_signals(is_program=argv is None) as signals:
        try:
            loaded = load(ServerConfig, sys.argv[1:] if argv is None else argv, environ)
            plan = resolve(loaded, environ)
            launch = PlannedLaunch(plan, programs or Programs.beside(sys.executable), environ, loaded.sources)
            asyncio.run(supervise(launch, signals))
        except StartupError as error:
            with contextlib.suppress(OSError):
                print(f"Error: {_kind(error)}: {error}", file=sys.stderr)
            return 1
        finally:
            _drop_unread_output()
    return 0


def resolve(loaded: Loaded[ServerConfig], environ: Mapping[str, str]) -> LaunchPlan:
    """The plan for these settings on this machine; logs each resolved default. Raises `StartupError`."""
    config = loaded.config
    set_up_logging(config.log_level, LogFormat.JSON if config.json_output else LogFormat.TEXT)
    if config.env:
        Scope("environment", as_one=config.json_output).log(logging.INFO, environment_report())
    logger.info("Settings: %s", " ".join(config.to_argv()))
    refuse_unsupported(config)
    devices = probe_devices(environ)
    assert config.model_id is not None
    content = read_model_config(config.model_id, config.revision, config.huggingface_hub_cache, config.hub_token)
    plan = LaunchPlan.resolve(config, ModelFacts.parse(content) if content is not None else None, devices)
    for setting in plan.resolved:
        logger.info("`%s` is %s: %s", setting.field, setting.value, setting.reason)
    logger.info("Attention %s (TGI: %s)", config.attention, plan.requested_attention)
    for warning in (*plan.warnings, *filter(None, (ignored_variables(environ),))):
        logger.warning("%s", warning)
    refuse_unsupported(plan.config)
    return plan


def _drop_unread_output() -> None:
    """Redirect output that has no reader, so that the interpreter does not fail when it flushes at exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _kind(error: StartupError) -> str:
    match error:
        case LaunchError():
            return error.kind
        case NotEnoughDevicesError():
            return "NotEnoughCUDADevices"
        case _:
            return "ArgumentValidation"


if __name__ == "__main__":
    sys.exit(main())
