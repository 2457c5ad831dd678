import asyncio

import pytest

from reference_server.router.started_call import StartedCall


async def test_a_call_runs_up_to_its_first_wait_before_it_is_awaited():
    steps: list[str] = []
    reply: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def work() -> str:
        steps.append("sent")
        first = await reply
        await asyncio.sleep(0)
        return f"{first} and last"

    call = StartedCall(work())
    steps.append("made")
    asyncio.get_running_loop().call_soon(reply.set_result, "first")

    assert await call == "first and last"
    assert steps == ["sent", "made"]


async def test_a_reply_may_arrive_before_the_call_is_awaited():
    reply: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def work() -> int:
        return await reply

    call = StartedCall(work())
    reply.set_result(7)
    await asyncio.sleep(0)

    assert await call == 7


async def test_a_call_that_waits_for_nothing_has_its_result():
    async def work() -> int:
        return 3

    assert await StartedCall(work()) == 3


@pytest.mark.parametrize("turns", [0, 1], ids=["before_its_first_wait", "later"])
async def test_an_error_is_raised_where_the_call_is_awaited(turns: int):
    async def work() -> None:
        for _ in range(turns):
            await asyncio.sleep(0)
        raise ValueError("wrong")

    call = StartedCall(work())

    with pytest.raises(ValueError, match="wrong"):
        await call


async def test_a_cancelled_task_cancels_the_awaited_call():
    ends: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise

    async def wait() -> None:
        await StartedCall(work())

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])

    assert (task.cancelled(), ends) == (True, ["cancelled"])


async def test_a_closed_call_runs_its_finally_blocks():
    ends: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ends.append("closed")

    StartedCall(work()).close()

    assert ends == ["closed"]
