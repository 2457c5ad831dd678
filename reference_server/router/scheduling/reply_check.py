"""Checks a step's reply before the Scheduler uses it: a malformed reply is a failed step, never a broken loop."""

from collections.abc import Set

from reference_server.errors import ShardError
from reference_server.messages import Generation, StepResult


def check_reply(reply: StepResult, request_ids: Set[int]) -> None:
    """Raise `ShardError` unless `reply` is well formed and only about `request_ids`, the requests of its call."""
    answered = {generation.request_id for generation in reply.generations}
    if len(answered) != len(reply.generations):
        raise ShardError("the model server answered a request twice in one step")
    held = set() if reply.batch is None else set(reply.batch.request_ids)
    if strangers := (answered | held) - request_ids:
        raise ShardError(f"the model server answered for requests that are not in the step: {sorted(strangers)[:10]}")
    if reply.batch is not None and len(held) != reply.batch.size:
        raise ShardError("the model server returned a batch that holds a request twice")
    if len(reply.drafts.proposed) != len(reply.drafts.accepted):
        raise ShardError("the model server returned draft counts of unequal lengths")
    for generation in reply.generations:
        tokens = generation.tokens
        if not 0 < len(tokens.ids) == len(tokens.logprobs) == len(tokens.texts) == len(tokens.is_special):
            raise _error_of(generation)


def _error_of(generation: Generation) -> ShardError:
    if not generation.tokens.ids:
        end = " and its end" if generation.generated_text is not None else ""
        return ShardError(f"the model server returned no token of request {generation.request_id}{end}")
    return ShardError(f"the model server returned token fields of unequal lengths for request {generation.request_id}")
