"""Whatever runs at once, the state ends as that of the serial execution; failures reach whoever needs the result."""

from __future__ import annotations

import threading
import time
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.engine import Engine, OperationSpan, Variable, observed
from unisono.engine.engine import MAIN, Handle
from unisono.errors import OperationError, UsageError

KINDS = ("communication", "loading", "update")
THREADS = dict.fromkeys(KINDS, 1)


def expect(engine: Engine, variable: Variable, name: str) -> Handle:
    """Add an operation that the caller carries out, who then calls `end`. Operations that need it wait for that."""
    return engine._add(Handle(name, (), [variable]))


class Step(NamedTuple):
    """An operation of a random graph: by numbers of variables."""

    read: frozenset[int]
    mutate: frozenset[int]
    kind: str
    fails: bool


def graphs(fails: bool = False) -> st.SearchStrategy[list[Step]]:
    """Operations on six variables, in the order in which they are pushed."""
    some = st.frozensets(st.integers(0, 5), max_size=3)
    failing = st.booleans() if fails else st.just(False)
    return st.lists(st.builds(Step, some, some, st.sampled_from(KINDS), failing), max_size=25)


class State:
    """Numbers that operations read and mutate; no two orders of what must be ordered give the same."""

    def __init__(self) -> None:
        self.values = list(range(6))

    def carry_out(self, index: int, step: Step) -> None:
        if step.fails:
            raise ValueError(f"step {index}")
        seen = tuple(self.values[place] for place in sorted(step.read | step.mutate))
        for place in sorted(step.mutate):
            before = self.values[place]
            if index % 3 == 0:
                time.sleep(0)  # an invitation to others that should wait
            self.values[place] = hash((index, place, seen, before))


def serially(steps: list[Step]) -> State:
    state = State()
    for index, step in enumerate(steps):
        state.carry_out(index, step)
    return state


@given(steps=graphs(), threads=st.integers(1, 8))
def test_a_random_graph_ends_as_its_serial_execution(steps: list[Step], threads: int) -> None:
    state = State()
    variables = [Variable(str(place)) for place in range(6)]
    with Engine(dict.fromkeys(KINDS, threads)) as engine:
        for index, step in enumerate(steps):
            engine.push(
                lambda index=index, step=step: state.carry_out(index, step),
                [variables[place] for place in step.read],
                [variables[place] for place in step.mutate],
                step.kind,
            )
    assert state.values == serially(steps).values


@given(steps=graphs(fails=True), threads=st.integers(1, 4))
def test_a_failure_spoils_only_dependent_operations(steps: list[Step], threads: int) -> None:
    state, variables = State(), [Variable(str(place)) for place in range(6)]
    with Engine(dict.fromkeys(KINDS, threads)) as engine:
        handles = [
            engine.push(
                lambda index=index, step=step: state.carry_out(index, step),
                [variables[place] for place in step.read],
                [variables[place] for place in step.mutate],
                step.kind,
                f"step {index}",
            )
            for index, step in enumerate(steps)
        ]
    spoilt, kept = [False] * 6, State()
    for index, (step, handle) in enumerate(zip(steps, handles, strict=True)):
        failed = step.fails or any(spoilt[place] for place in step.read | step.mutate)
        if failed:
            with pytest.raises(OperationError, match="failed: ValueError: step"):
                handle.wait()
            for place in step.mutate:
                spoilt[place] = True
        else:
            assert handle.wait()
            kept.carry_out(index, step)
    assert state.values == kept.values
    assert [variable.failure is not None for variable in variables] == spoilt


def test_a_failure_names_the_operation_that_failed_first() -> None:
    sums, weights = Variable("sums"), Variable("weights")

    def exchange() -> None:
        raise ConnectionError("rank 2 has gone")

    with Engine(THREADS) as engine:
        first = engine.push(exchange, mutate=[sums], kind="communication", name="the exchange of bucket 3")
        engine.push(lambda: None, [sums], [weights], name="the update of bucket 3")
        with pytest.raises(OperationError, match=r"^the exchange of bucket 3 failed: Conn.*: rank 2 has gone$"):
            first.wait()
        message = "^the exchange of bucket 3, needed by a wait for weights, failed: ConnectionError: rank 2 has gone$"
        with pytest.raises(OperationError, match=message) as raised:
            engine.wait(weights)
        assert isinstance(raised.value.__cause__, ConnectionError)


def test_a_long_chain_that_fails_at_its_head() -> None:
    """No recursion, however many need what failed."""
    chain = Variable("chain")
    with Engine(THREADS) as engine:
        head = expect(engine, chain, "head")
        last = [engine.push(lambda: None, mutate=[chain]) for _ in range(20_000)][-1]
        engine.end(head, ValueError("gone"))
        with pytest.raises(OperationError, match="head, needed by update, failed"):
            last.wait(20)


def test_reads_run_concurrently() -> None:
    """Four reads that each wait until all four are there."""
    there, shared = threading.Barrier(4, timeout=20), Variable()
    with Engine({"update": 4}) as engine:
        handles = [engine.push(there.wait, [shared]) for _ in range(4)]
        assert all(handle.wait(20) for handle in handles)


def test_an_expected_operation_holds_others_back() -> None:
    gradient, seen = Variable("gradient"), []
    with Engine(THREADS) as engine:
        filled = expect(engine, gradient, "the backward pass")
        exchanged = engine.push(lambda: seen.append("exchange"), mutate=[gradient], kind="communication")
        assert not exchanged.wait(0.05)
        seen.append("backward")
        engine.end(filled)
        assert exchanged.wait(20)
    assert seen == ["backward", "exchange"]


def test_an_expected_operation_may_end_before_it_is_ready() -> None:
    gradient, seen, go = Variable("gradient"), [], threading.Event()
    with Engine(THREADS) as engine:
        engine.push(lambda: go.wait(20), mutate=[gradient])
        filled = expect(engine, gradient, "the backward pass")
        engine.push(lambda: seen.append("exchange"), mutate=[gradient])
        engine.end(filled)
        assert not engine.wait(gradient, seconds=0.05)
        assert not seen
        go.set()
        assert engine.wait(gradient, seconds=20)
    assert seen == ["exchange"]


def test_each_kind_has_its_threads_and_is_observed() -> None:
    spans = list[OperationSpan]()
    with Engine({"communication": 1, "update": 1}) as engine:
        engine.push(lambda: None, kind="communication", name="exchange", observe=spans.append)
        engine.push(lambda: None, kind="update", name="update", observe=spans.append)
    assert {(span.name, span.kind, span.thread) for span in spans} == {
        ("exchange", "communication", "unisono communication 0"),
        ("update", "update", "unisono update 0"),
    }
    assert all(span.begin <= span.end for span in spans)


def test_operations_of_the_main_thread_are_observed() -> None:
    """After what was pushed before it, in the thread that calls, whatever the kinds of the engine are."""
    spans, seen, buffer = list[OperationSpan](), list[str](), Variable("buffer")
    with Engine({"update": 1}) as engine:
        engine.push(lambda: seen.append("pack"), mutate=[buffer], name="pack 1", observe=spans.append)
        engine.carry_out(lambda: seen.append("exchange"), [], [buffer], "exchange 1", spans.append)
        assert seen == ["pack", "exchange"]
    pack, exchange = spans
    assert (exchange.name, exchange.kind, exchange.thread) == ("exchange 1", MAIN, threading.current_thread().name)
    assert (pack.name, pack.kind, pack.thread) == ("pack 1", "update", "unisono update 0")
    assert pack.end <= exchange.begin <= exchange.end


def test_failures_of_operations_of_the_main_thread() -> None:
    spans, seen, buffer = list[OperationSpan](), list[str](), Variable("buffer")

    def exchange() -> None:
        raise ConnectionError("rank 2 has gone")

    with Engine({"update": 1}) as engine:
        with pytest.raises(ConnectionError):
            engine.carry_out(exchange, [], [buffer], "exchange 1", spans.append)
        with pytest.raises(OperationError, match="exchange 1, needed by exchange 2, failed: Conn"):
            engine.carry_out(lambda: seen.append("exchange 2"), [], [buffer], "exchange 2", spans.append)
    assert not seen
    assert "exchange 2" not in {span.name for span in spans}


def test_a_kind_without_threads() -> None:
    with Engine({"update": 1}) as engine, pytest.raises(UsageError, match="'loading'; it has update"):
        engine.push(lambda: None, kind="loading")


def test_no_threads_are_left() -> None:
    before = threading.active_count()
    with Engine(THREADS) as engine:
        engine.push(lambda: None)
    assert threading.active_count() == before


def test_a_spoilt_expected_operation_ends_once() -> None:
    """It ends by itself when what it needs has failed; whoever carries it out may still say that it is over."""
    gradient = Variable("gradient")
    with Engine(THREADS) as engine:
        head = expect(engine, gradient, "head")
        filled = expect(engine, gradient, "the backward pass")
        engine.end(head, ValueError("gone"))
        with pytest.raises(OperationError, match="head, needed by the backward pass, failed"):
            filled.wait(20)
        engine.end(filled)
        late = expect(engine, gradient, "a late one")
        engine.end(late)
        engine.end(late)


def test_an_expected_operation_may_end_as_it_becomes_ready() -> None:
    with Engine({"update": 2}) as engine:
        for _ in range(3000):
            gradient = Variable("gradient")
            engine.push(lambda: None, mutate=[gradient])
            filled = expect(engine, gradient, "the backward pass")
            after = engine.push(lambda: None, mutate=[gradient])
            engine.end(filled)
            assert after.wait(20)


def test_a_block_is_reported_with_its_thread_and_its_times() -> None:
    spans = list[OperationSpan]()

    def work() -> None:
        with observed(spans.append, "whole", "loading"), observed(spans.append, "part", "decoding"):
            pass

    before = time.perf_counter()
    thread = threading.Thread(target=work, name="decoding_3")
    thread.start()
    thread.join()
    part, whole = spans
    assert [(span.name, span.kind, span.thread, span.about) for span in spans] == [
        ("part", "decoding", "decoding_3", None),
        ("whole", "loading", "decoding_3", None),
    ]
    assert before <= whole.begin <= part.begin <= part.end <= whole.end <= time.perf_counter()


def test_a_block_that_fails_is_not_reported() -> None:
    spans = list[OperationSpan]()
    with pytest.raises(ValueError, match="of its own"), observed(spans.append, "work", "loading"):
        raise ValueError("an error of its own")
    assert not spans


def test_without_an_observer_no_clock_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unisono.engine.engine.time", None)
    with observed(None, "work", "loading"):
        pass
    with pytest.raises(AttributeError), observed(print, "work", "loading"):
        pass
