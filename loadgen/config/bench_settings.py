"""The fields of a load: TOML keys and flags have their names. `BenchConfig` adds checks and derived values."""

from typing import Literal

from pydantic import ConfigDict, Field

from loadgen.config.arrival_settings import ArrivalSettings
from loadgen.config.file_settings import FileSettings
from loadgen.config.limit_settings import LimitSettings
from loadgen.config.target_settings import TargetSettings
from loadgen.config.workload_settings import WorkloadSettings

MAX_WORKERS = 1_000
NO_SALT = "off"


# The fields of the last base come first in a manifest.
class BenchSettings(TargetSettings, FileSettings, WorkloadSettings, LimitSettings, ArrivalSettings):
    """One load and its target."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    temperature: float | None = Field(None, ge=0, le=100, description="Sampling temperature. Default greedy.")
    seed: int = Field(0, ge=0, lt=2**63, description="Seed of lengths, arrivals and, with the salt, of texts.")
    salt: str | None = Field(
        None,
        min_length=1,
        max_length=100,
        description="Text that makes the prompts of a run different from earlier ones, so that the server's prefix "
        "cache does not have them. Default 64 random bits per run. An equal salt gives equal prompts; `off` also "
        "sends the texts of a file unchanged.",
    )
    priority: Literal["auto", "normal"] = Field(
        "auto",
        description="Scheduling of the load generator. `auto`: real-time if permitted, so that its times are "
        "accurate on a machine that the server keeps busy. `normal`: as other processes.",
    )
    workers: int = Field(
        1,
        ge=1,
        le=MAX_WORKERS,
        description="Number of processes on this machine that share the load. Use several if one process is too "
        "slow for it.",
    )
    label: str = Field("", max_length=200, description="Name of this run in tables and reports.")
