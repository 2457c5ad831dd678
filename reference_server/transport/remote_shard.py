"""`RemoteShard`: a shard of another process behind a channel that carries the messages of one schema."""

from collections.abc import Sequence
from typing import Protocol

from reference_server.adapter_source import AdapterSource
from reference_server.errors import ShardError
from reference_server.messages import Batch, CachedBatch, ModelInfo, StepResult, WarmupReply, WarmupRequest
from reference_server.transport.codec import WireCodec
from reference_server.transport.wire_schema import Message, WireSchema


class WireChannel(Protocol):
    """A connection to one shard, over gRPC or the link."""

    @property
    def schema(self) -> WireSchema: ...

    async def call(self, method: str, request: Message) -> Message:
        """The reply. Raises ShardError, and ShardConnectionError if the shard cannot be reached."""
        ...

    async def close(self) -> None: ...


class RemoteShard:
    """`Shard` over a channel."""

    def __init__(self, channel: WireChannel) -> None:
        self._channel = channel
        self._messages = channel.schema.messages
        self._codec = WireCodec(channel.schema)
        self._block_size: int | None = None

    async def close(self) -> None:
        await self._channel.close()

    async def info(self) -> ModelInfo:
        info = self._codec.decode_info(await self._channel.call("Info", self._messages["InfoRequest"]()))
        self._block_size = info.block_size
        return info

    async def health(self) -> None:
        await self._channel.call("Health", self._messages["HealthRequest"]())

    async def warmup(self, request: WarmupRequest) -> WarmupReply:
        message = self._codec.encode_warmup_request(request, await self._known_block_size())
        return self._codec.decode_warmup_reply(await self._channel.call("Warmup", message), request)

    async def prefill(self, batch: Batch, cached: CachedBatch | None = None) -> StepResult:
        block_size = await self._known_block_size()
        try:
            message = self._codec.encode_prefill_request(batch, cached, block_size)
        except ValueError as error:
            raise ShardError(f"a request cannot be sent: {error}") from error
        return self._codec.decode_step(await self._channel.call("Prefill", message))

    async def decode(self, batches: Sequence[CachedBatch]) -> StepResult:
        return self._codec.decode_step(await self._channel.call("Decode", self._codec.encode_decode_request(batches)))

    async def filter_batch(self, batch_id: int, request_ids: Sequence[int]) -> CachedBatch:
        message = self._messages["FilterBatchRequest"](batch_id=batch_id, request_ids=request_ids)
        return self._codec.decode_cached((await self._channel.call("FilterBatch", message)).batch)

    async def clear_cache(self, batch_id: int | None = None) -> None:
        kind = self._messages["ClearCacheRequest"]
        await self._channel.call("ClearCache", kind() if batch_id is None else kind(id=batch_id))

    async def load_adapter(self, source: AdapterSource) -> int | None:
        self._require_adapters()
        reply = await self._channel.call("LoadAdapter", self._codec.encode_adapter(source))
        return reply.bytes if reply.HasField("bytes") else None

    async def unload_adapter(self, adapter_id: str) -> None:
        self._require_adapters()
        await self._channel.call("UnloadAdapter", self._messages["UnloadAdapterRequest"](adapter_id=adapter_id))

    def _require_adapters(self) -> None:
        if "LoadAdapterRequest" not in self._messages:
            raise ShardError(f"schema {self._channel.schema.version} loads no adapters: set `--grpc-schema v3`")

    async def _known_block_size(self) -> int:
        return self._block_size or (await self.info()).block_size
