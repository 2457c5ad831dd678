"""What can go wrong in a study, each with the exit code its command returns.

TunerError
├── SpaceError          2   a space that cannot be searched, or settings that cannot work together
├── StudyError          2   a study that cannot be opened or continued
├── CannotMeasureError  4   the generator or the machine failed repeatedly
├── StorageLostError    4   the storage could not be reached for a minute
└── DeviceBusyError     4   the device is held by another server
"""

from loadgen.errors import LoadgenError


class TunerError(LoadgenError):
    """Root of what a study raises on purpose."""


class SpaceError(TunerError):
    exit_code = 2


class StudyError(TunerError):
    exit_code = 2


class CannotMeasureError(TunerError):
    """Nothing can be said about any configuration."""


class StorageLostError(TunerError):
    """The study's storage cannot be reached."""


class DeviceBusyError(TunerError):
    """Another server holds the device, or does not give its memory back."""
