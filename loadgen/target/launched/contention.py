"""How long the threads of a server waited for a processor while they ran, from the kernel's scheduler (Linux)."""

import contextlib
from dataclasses import dataclass

from loadgen.target.launched.process_memory import PROC, family


@dataclass(frozen=True, slots=True)
class ProcessorTimes:
    """Nanoseconds that the threads of a process and its descendants ran, and waited for a processor to run on."""

    ran_ns: int
    waited_ns: int

    @classmethod
    def of(cls, pid: int) -> "ProcessorTimes | None":
        """Up to now; None if the kernel does not report them."""
        ran = waited = 0
        for process in family(pid):
            for path in (PROC / str(process) / "task").glob("*/schedstat"):
                with contextlib.suppress(OSError, ValueError, IndexError):
                    fields = path.read_text().split()
                    ran, waited = ran + int(fields[0]), waited + int(fields[1])
        return cls(ran, waited) if ran else None

    def contention_since(self, before: "ProcessorTimes") -> float | None:
        """Time ready to run over time that it ran: 1 without any wait; None if it did not run."""
        ran, waited = self.ran_ns - before.ran_ns, self.waited_ns - before.waited_ns
        return 1 + max(waited, 0) / ran if ran > 0 else None
