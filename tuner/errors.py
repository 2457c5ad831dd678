"""Exceptions of a study, each with the exit code that its command returns.

TunerError
├── SpaceError          2   a space that cannot be searched, or settings that cannot be combined
├── StudyError          2   a study that cannot be opened or continued
├── NotSimulatedError   2   a configuration or load that the simulator does not model
├── CostModelError      2   a cost file that is missing or wrong, or steps that cannot be fitted
├── TraceError          2   a file that is missing or not a step trace
├── ModelSizeError      2   a model whose memory cannot be computed, or GPUs that cannot share it
├── NoFleetError        1   no number of replicas meets the SLO
├── CannotMeasureError  4   the load generator or the machine failed repeatedly
├── StorageLostError    4   the storage is unreachable for a minute
└── DeviceBusyError     4   another process uses the device
"""

from loadgen.errors import LoadgenError


class TunerError(LoadgenError):
    """Root of the exceptions that `tuner` raises."""


class SpaceError(TunerError):
    exit_code = 2


class StudyError(TunerError):
    exit_code = 2


class NotSimulatedError(TunerError):
    exit_code = 2


class CostModelError(TunerError):
    exit_code = 2


class TraceError(TunerError):
    exit_code = 2


class ModelSizeError(TunerError):
    exit_code = 2


class NoFleetError(TunerError):
    exit_code = 1


class CannotMeasureError(TunerError):
    """No configuration can be measured."""


class StorageLostError(TunerError):
    """The study's storage is unreachable."""


class DeviceBusyError(TunerError):
    """Another process uses the device, or its memory is not freed."""
