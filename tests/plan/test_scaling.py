import pytest

from unisono.plan.scaling import epoch_seconds, last_worthwhile, weak_speedup


def test_shares_of_communication_give_swcaffes_speedups() -> None:
    """Figures 10 and 11, of 1,024 nodes; AlexNet with 256, 128, 64 samples a node, ResNet-50 with 32."""
    for share, speedup in ((0.3013, 715.45), (0.4515, 561.58), (0.6001, 409.50), (0.1911, 828.32)):
        assert weak_speedup(1024, 1 - share, share) == pytest.approx(speedup, rel=1e-3)


def test_a_last_smaller_minibatch_is_a_step() -> None:
    assert epoch_seconds(1000, 256, 0.5) == 2.0
    assert epoch_seconds(1024, 256, 0.5) == 2.0
    assert epoch_seconds(1025, 256, 0.5) == 2.5


def test_the_last_worthwhile_number_is_before_the_first_that_adds_too_little() -> None:
    speedups = [(1, 1.0), (2, 2.0), (4, 2.9), (8, 6.9)]
    assert last_worthwhile(speedups) == 2
    assert last_worthwhile(speedups, 0.4) == 8
    assert last_worthwhile(speedups[:1]) == 1
