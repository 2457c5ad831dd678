"""What can go wrong around a run, each with the exit code its command returns.

LoadgenError
├── UsageError       2   a flag, a file or a combination of them that is wrong
└── MeasurementError 4   nothing could be measured
    ├── StartError       the server under test did not come up
    ├── TargetError      the server does not answer, or not as the API asks
    └── WorkerError      the generator's own process failed
"""


class LoadgenError(Exception):
    exit_code = 4


class UsageError(LoadgenError):
    exit_code = 2


class MeasurementError(LoadgenError):
    exit_code = 4


class StartError(MeasurementError):
    """Carries the end of the server's log, when it wrote one."""

    def __init__(self, message: str, log_tail: str = "") -> None:
        super().__init__(f"{message}\n{log_tail}" if log_tail else message)
        self.log_tail = log_tail


class TargetError(MeasurementError):
    """Carries the HTTP status where one arrived."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class WorkerError(MeasurementError):
    pass
