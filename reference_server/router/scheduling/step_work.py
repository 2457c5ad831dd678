"""The work of each model step in tokens and rows, derived from the scheduler's entries: input of the step trace."""

from typing import NamedTuple

from reference_server.router.scheduling.calls import Decode, Deliveries, Prefill
from reference_server.router.scheduling.scheduler import Scheduler


class StepWork(NamedTuple):
    """The work of one step.

    `prompts` rows compute `tokens` prompt tokens and read `cached` tokens from the cache; `squares` is the sum of
    (length² - cached²) over them. `rows` decode one token each and attend to `kv` tokens, the new one included.
    `ended` requests ended with the step before: between the two steps, the shard removes their rows, and the router
    finishes their responses and often receives the requests that follow them.
    """

    prompts: int = 0
    tokens: int = 0
    squares: int = 0
    cached: int = 0
    rows: int = 0
    kv: int = 0
    ended: int = 0


class StepMeter:
    """Tracks the context length of each decoding entry. Ask for a call's `work` before the call is sent.

    Report an idle time too, because it is not part of a step.
    """

    def __init__(self) -> None:
        self._context: dict[int, int] = {}  # tokens with K/V of each entry that decodes
        self._kv = 0
        self._ended = 0

    def on_idle(self) -> None:
        self._ended = 0

    def work(self, call: Prefill | Decode, scheduler: Scheduler) -> StepWork:
        new = call.entries if type(call) is Prefill else ()
        is_alone = type(call) is Prefill and call.cached is None
        prompts = tokens = squares = cached = 0
        for entry in new if is_alone else scheduler.entries:
            if entry.remaining_prefill:
                have = entry.request.input_len - entry.remaining_prefill
                after = have + entry.next_chunk
                prompts += 1
                tokens += entry.next_chunk
                squares += after * after - have * have
                cached += have
        rows = 0 if is_alone else len(self._context)
        return StepWork(prompts, tokens, squares, cached, rows, self._kv + rows if rows else 0, self._ended)

    def adapted(self, call: Prefill | Decode, scheduler: Scheduler) -> tuple[int, int]:
        """The adapters of a call, and the tokens that it computes with one."""
        new = call.entries if type(call) is Prefill else ()
        is_alone = type(call) is Prefill and call.cached is None
        adapters: set[str] = set()
        tokens = 0
        for entry in new if is_alone else scheduler.entries:
            adapter_id = entry.request.wire.adapter_id
            if adapter_id is not None and (entry.remaining_prefill or entry.id in self._context):
                adapters.add(adapter_id)
                tokens += entry.next_chunk if entry.remaining_prefill else 1
        return len(adapters), tokens

    def on_reply(self, deliveries: Deliveries) -> tuple[int, int]:
        """Add a reply's tokens; returns the rows with output, and the tokens beyond one per row."""
        context, extra = self._context, 0
        self._ended = len(deliveries.lost) + deliveries.num_dropped
        for entry, generation in deliveries.generations:
            count = len(generation.tokens)
            extra += count - 1
            before = context.get(entry.id)
            if generation.generated_text is not None:
                self._ended += 1
                if before is not None:
                    self._kv -= context.pop(entry.id)
            elif before is None:
                context[entry.id] = entry.request.input_len + count - 1
                self._kv += entry.request.input_len + count - 1
            else:
                context[entry.id] = before + count
                self._kv += count
        return len(deliveries.generations), extra

    def forget_others(self, scheduler: Scheduler) -> None:
        """Forget entries that ended without a last token: cancelled, lost or failed."""
        live = {entry.id for entry in scheduler.entries}
        for entry_id in [entry_id for entry_id in self._context if entry_id not in live]:
            self._kv -= self._context.pop(entry_id)
