"""locust's master runner and dispatcher for fixed partitions. A malformed message does not end the run."""

# First: it makes the sockets of everything imported after it cooperative.
from loadgen.generator.locust_import import locust

# isort: split
import locust.dispatch
import locust.env
import locust.runners

# isort: split
import logging
from typing import Any

from loadgen.generator.distributed.worker_group import WorkerGroup

logger = logging.getLogger(__name__)


class GroupRunner(locust.runners.MasterRunner):  # type: ignore[misc]
    """locust's master. Once `is_closed`, late workers get no users: partitions are fixed before the load begins."""

    is_closed = False

    def handle_message(self, client_id: str, msg: Any) -> None:
        if self.is_closed and msg.type == "client_ready" and client_id not in self.clients:
            # Acknowledged, so that it sends a hello and is refused with a reason.
            self.send_message("ack", client_id=client_id, data={"index": -1})
            return
        try:
            super().handle_message(client_id, msg)
        except Exception:
            # Otherwise locust's listener ends, and the run with it.
            logger.exception("dropped a malformed message of type %s", msg.type)


class PartitionDispatcher(locust.dispatch.UsersDispatcher):  # type: ignore[misc]
    """locust's dispatcher, assigning users in partition order, so that each worker gets `Partition.share_of` them."""

    _worker_nodes: list[Any]

    def __init__(self, group: WorkerGroup, worker_nodes: list[Any], user_classes: list[Any]) -> None:
        self._index_of = {member.client_id: member.index for member in group.members}
        super().__init__(worker_nodes, user_classes)

    def _sort_workers(self) -> None:
        self._worker_nodes = sorted(self._worker_nodes, key=lambda node: self._index_of.get(node.id, 0))
