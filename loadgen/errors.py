"""The exceptions of the load generator, each with the exit code of its command.

LoadgenError
├── UsageError       2   a wrong flag, file or combination of them
└── MeasurementError 4   nothing could be measured
    ├── StartError       the server under test did not start
    ├── TargetError      the server does not answer, or not as its API requires
    └── WorkerError      the load generator's own process failed
"""


class LoadgenError(Exception):
    exit_code = 4


class UsageError(LoadgenError):
    exit_code = 2


class MeasurementError(LoadgenError):
    exit_code = 4


class StartError(MeasurementError):
    """`log_tail` is the end of the server's log."""

    def __init__(self, message: str, log_tail: str = "") -> None:
        super().__init__(f"{message}\n{log_tail}" if log_tail else message)
        self.log_tail = log_tail


class TargetError(MeasurementError):
    """`status` is the HTTP status, if one arrived."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class WorkerError(MeasurementError):
    pass
