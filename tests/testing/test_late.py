import random
import threading

import pytest

from unisono.testing.late import Late, Queue


def order_of(seed: int) -> list[tuple[int, int]]:
    """Return (queue, work) in the order in which queues run them; work 4 of queue 1 waits for work 3 of queue 0."""
    late, queues, ran = Late(), [Queue(0), Queue(0), Queue(1)], list[tuple[int, int]]()
    late.reseed(seed)
    for work in range(10):
        for index, queue in enumerate(queues):
            late.put(queue, lambda index=index, work=work: ran.append((index, work)))
        if work == 3:
            late.put(queues[1], late.point(queues[0]))
    late.run_device(0)
    late.run_device(1)
    return ran


def test_works_of_a_queue_run_in_order_and_after_the_points_that_it_waits_for() -> None:
    for seed in range(100):
        ran = order_of(seed)
        assert all([work for queue, work in ran if queue == index] == list(range(10)) for index in range(3))
        assert ran.index((0, 3)) < ran.index((1, 4))


def test_the_seed_chooses_the_order() -> None:
    assert all(order_of(seed) == order_of(seed) for seed in range(20))
    assert len({tuple(order_of(seed)) for seed in range(50)}) > 20


def test_what_nobody_waits_for_may_not_run_and_reseed_runs_it() -> None:
    late, queue, ran = Late(), Queue(0), list[int]()
    late.put(queue, lambda: ran.append(1))
    assert ran == []
    late.reseed(1)
    assert ran == [1]


def test_long_chains_of_points_are_followed() -> None:
    late, queues, ran = Late(), [Queue(0) for _ in range(300)], list[int]()
    for index, queue in enumerate(queues):
        late.put(queue, lambda index=index: ran.append(index))
        if index + 1 < len(queues):
            late.put(queues[index + 1], late.point(queue))
    late.run_to(late.point(queues[-1]))
    assert ran == list(range(300))


def test_an_error_is_raised_once_by_who_waits() -> None:
    late, queue = Late(), Queue(0)
    late.put(queue, lambda: int("one"))
    late.put(queue, lambda: None)
    with pytest.raises(RuntimeError, match="ran late failed: invalid literal"):
        late.run_to(late.point(queue))
    late.run_to(late.point(queue))


def test_threads_put_and_wait_at_the_same_time() -> None:
    late, queues, ran = Late(), [Queue(0) for _ in range(4)], [list[int]() for _ in range(4)]
    late.reseed(3)

    def use(index: int) -> None:
        for work in range(300):
            late.put(queues[index], lambda work=work: ran[index].append(work))
            if random.random() < 0.1:
                late.put(queues[index], late.point(queues[index - 1]))
            if random.random() < 0.1:
                late.run_to(late.point(queues[index]))
                assert ran[index] == list(range(work + 1))

    threads = [threading.Thread(target=use, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    late.run_device(0)
    assert ran == [list(range(300))] * 4
