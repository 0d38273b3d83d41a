"""Owned tasks and numbered news."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from worldmove.feed import REMEMBERED, Feed
from worldmove.tasks import Tasks


async def fails(error: BaseException) -> None:
    raise error


async def test_every_error_reaches_the_owner_and_ends_nothing_else() -> None:
    errors: list[BaseException] = []
    tasks = Tasks(errors.append)
    go = asyncio.Event()
    done: list[int] = []

    async def patient() -> None:
        await go.wait()
        done.append(1)

    tasks.spawn(patient(), name="patient")
    first, second = ValueError("one"), KeyError("two")
    tasks.spawn(fails(first))
    tasks.spawn(fails(second))
    await asyncio.sleep(0)
    go.set()
    await tasks.join()
    assert errors == [first, second]
    assert done == [1]


async def test_an_error_is_told_before_the_join_returns() -> None:
    """Whoever joins may rely on having been told: a round that failed is never taken for complete."""
    order: list[str] = []
    tasks = Tasks(lambda _error: order.append("error"))
    tasks.spawn(fails(ValueError()))
    await tasks.join()
    order.append("joined")
    assert order == ["error", "joined"]


async def test_join_waits_for_what_is_spawned_meanwhile() -> None:
    tasks = Tasks(lambda error: pytest.fail(str(error)))
    done: list[int] = []

    async def chain(left: int) -> None:
        await asyncio.sleep(0)
        done.append(left)
        if left:
            tasks.spawn(chain(left - 1))

    tasks.spawn(chain(5))
    await tasks.join()
    assert done == [5, 4, 3, 2, 1, 0]


async def test_cancel_waits_for_cleanup_and_for_what_cleanup_spawns() -> None:
    errors: list[BaseException] = []
    tasks = Tasks(errors.append)
    order: list[str] = []
    running = asyncio.Event()

    async def late() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            order.append("late")

    async def slow() -> None:
        running.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            order.append("slow")
            tasks.spawn(late())

    tasks.spawn(slow())
    await running.wait()
    await tasks.cancel()
    assert order[0] == "slow"
    assert errors == []
    await tasks.join()


async def test_an_error_in_cleanup_is_told() -> None:
    errors: list[BaseException] = []
    tasks = Tasks(errors.append)
    running = asyncio.Event()

    async def bad() -> None:
        running.set()
        try:
            await asyncio.Event().wait()
        finally:
            raise ValueError("cleanup")

    tasks.spawn(bad())
    await running.wait()
    await tasks.cancel()
    assert [str(error) for error in errors] == ["cleanup"]


async def test_a_cancelled_task_is_no_error() -> None:
    errors: list[BaseException] = []
    tasks = Tasks(errors.append)
    task = tasks.spawn(asyncio.Event().wait())  # type: ignore[arg-type]
    task.cancel()
    await tasks.join()
    assert task.cancelled()
    assert errors == []


async def test_cancelling_the_join_leaves_the_tasks() -> None:
    tasks = Tasks(lambda error: pytest.fail(str(error)))
    go = asyncio.Event()
    done: list[int] = []

    async def work() -> None:
        await go.wait()
        done.append(1)

    tasks.spawn(work())
    joining = asyncio.ensure_future(tasks.join())
    await asyncio.sleep(0)
    joining.cancel()
    await asyncio.wait({joining})
    go.set()
    await tasks.join()
    assert done == [1]


async def test_idle_tasks_join_and_cancel_at_once() -> None:
    tasks = Tasks(lambda error: pytest.fail(str(error)))
    await tasks.join()
    await tasks.cancel()


async def collect(reader: AsyncIterator[tuple[int, str]], into: list[tuple[int, str]]) -> None:
    async for item in reader:
        into.append(item)  # noqa: PERF401 - the list is looked at meanwhile


async def settled(rounds: int = 5) -> None:
    for _ in range(rounds):
        await asyncio.sleep(0)


async def test_readers_get_what_was_and_what_comes() -> None:
    feed: Feed[str] = Feed()
    assert feed.last == 0
    feed.publish("a")
    feed.publish("b")
    all_of_it: list[tuple[int, str]] = []
    later: list[tuple[int, str]] = []
    readers = [
        asyncio.ensure_future(collect(feed.read(), all_of_it)),
        asyncio.ensure_future(collect(feed.read(after=1), later)),
    ]
    await settled()
    assert later == [(2, "b")]
    feed.publish("c")
    await settled()
    feed.publish("d")
    feed.close()
    await asyncio.gather(*readers)
    assert all_of_it == [(1, "a"), (2, "b"), (3, "c"), (4, "d")]
    assert later == all_of_it[1:]
    assert feed.last == 4


async def test_a_reader_that_lags_continues_with_the_oldest_that_is_kept() -> None:
    feed: Feed[str] = Feed()
    feed.publish("first")
    reader = feed.read()
    assert await anext(reader) == (1, "first")
    for number in range(2, 3 * REMEMBERED):
        feed.publish(str(number))
    feed.close()
    rest = [item async for item in reader]
    numbers = [number for number, _ in rest]
    assert numbers == list(range(feed.last - REMEMBERED + 1, feed.last + 1))
    assert all(text == str(number) for number, text in rest)


async def test_what_is_published_while_a_reader_is_busy_is_not_lost() -> None:
    feed: Feed[str] = Feed()
    feed.publish("1")
    seen = []
    async for number, text in feed.read():
        assert text == str(number)
        seen.append(number)
        if number < 20:
            feed.publish(str(number + 1))
            await asyncio.sleep(0)
        else:
            feed.close()
    assert seen == list(range(1, 21))


async def test_a_closed_feed_ends_readers_after_the_last_item() -> None:
    feed: Feed[str] = Feed()
    feed.close()
    assert [item async for item in feed.read()] == []
    assert [item async for item in feed.read(after=7)] == []
    other: Feed[str] = Feed()
    other.publish("a")
    other.close()
    other.close()
    assert [item async for item in other.read()] == [(1, "a")]
    assert [item async for item in other.read(after=1)] == []


async def test_a_reader_waits_without_work_and_can_be_cancelled() -> None:
    feed: Feed[str] = Feed()
    got: list[tuple[int, str]] = []
    reading = asyncio.ensure_future(collect(feed.read(after=100), got))
    await settled()
    feed.publish("older than what was asked for")
    await settled()
    assert got == []
    assert not reading.done()
    reading.cancel()
    await asyncio.wait({reading})
    assert reading.cancelled()


async def test_two_readers_do_not_take_from_each_other() -> None:
    feed: Feed[str] = Feed()
    lists: list[list[tuple[int, str]]] = [[], [], []]
    readers = [asyncio.ensure_future(collect(feed.read(), one)) for one in lists]
    for number in range(1, 50):
        feed.publish(str(number))
        if number % 7 == 0:
            await asyncio.sleep(0)
    feed.close()
    await asyncio.gather(*readers)
    assert all(one == [(number, str(number)) for number in range(1, 50)] for one in lists)
