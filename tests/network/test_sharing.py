import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.network.sharing import fair_rates

LINKS = 6
UNLIMITED = LINKS

routes = st.lists(
    st.tuples(st.integers(0, LINKS - 1), st.integers(0, LINKS), st.integers(0, LINKS)).map(
        lambda route: route if len({*route}) == 3 else (route[0], UNLIMITED, UNLIMITED)
    ),
    min_size=1,
    max_size=30,
)
limits = st.lists(st.integers(1, 100), min_size=LINKS, max_size=LINKS)


def alone(routes: list[tuple[int, ...]], capacities: np.ndarray) -> np.ndarray:
    """Rates of flows by themselves, without limits of their own."""
    ones, none = np.ones(len(routes), np.int64), np.full(len(routes), np.inf)
    return fair_rates(np.array(routes), capacities, ones, none)


@settings(deadline=None)
@given(routes, limits)
def test_rates_are_max_min_fair(routes: list[tuple[int, ...]], limits: list[int]) -> None:
    capacities = np.array([*limits, np.inf], float)
    rates = alone(routes, capacities)
    users = [[flow for flow, route in enumerate(routes) if link in route] for link in range(LINKS)]
    carried = np.array([rates[flows].sum() for flows in users])
    assert (carried <= capacities[:LINKS] * (1 + 1e-9)).all()
    for flow, route in enumerate(routes):
        assert any(
            carried[link] >= capacities[link] * (1 - 1e-9) and rates[flow] >= rates[users[link]].max() * (1 - 1e-9)
            for link in route
            if link != UNLIMITED
        )


@settings(deadline=None)
@given(routes, limits, st.lists(st.tuples(st.integers(1, 5), st.integers(1, 50)), min_size=30, max_size=30))
def test_groups_have_the_rates_of_their_flows(
    routes: list[tuple[int, ...]], limits: list[int], groups: list[tuple[int, int]]
) -> None:
    counts, own = (np.array(numbers[: len(routes)]) for numbers in zip(*groups, strict=True))
    capacities = np.array([*limits, np.inf], float)
    rates = fair_rates(np.array(routes), capacities, counts, own.astype(float))
    of = np.repeat(np.arange(len(routes)), counts)
    private = np.arange(len(of)) + LINKS + 1  # each flow's limit as a link of its own
    written_out = [(*routes[group], link) for group, link in zip(of, private, strict=True)]
    expected = alone(written_out, np.array([*capacities, *own[of]]))
    np.testing.assert_allclose(rates[of], expected, rtol=1e-9)


def test_unused_share_goes_to_other_flows() -> None:
    assert alone([(0, 2), (0, 1), (1, 2)], np.array([1.0, 5.0, np.inf])).tolist() == [0.5, 0.5, 4.5]
