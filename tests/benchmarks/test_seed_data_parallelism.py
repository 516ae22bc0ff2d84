import pytest
from benchmarks.seeds.convolution_loops import ConvolutionLoops
from benchmarks.seeds.data_parallelism import exchanged_bytes, flops_per_byte, step_flops
from benchmarks.seeds.overlap import Layer, Machine, least_samples
from hypothesis import given
from hypothesis import strategies as st

C5 = ConvolutionLoops(512, 1024, (12, 12), (3, 3))

sides = st.tuples(st.integers(1, 60), st.integers(1, 60))
convolutions = st.builds(ConvolutionLoops, st.integers(1, 600), st.integers(1, 600), sides, sides, st.integers(1, 4))


def test_the_worked_example() -> None:
    assert flops_per_byte(C5, 1) == 216
    assert least_samples([Layer(step_flops(C5, 1), exchanged_bytes(C5.weights))], Machine(336 * 1e9, 1e9)) == (
        pytest.approx(3 * 336 / 216)  # alone it has only its own third to hide behind
    )


@given(convolutions, st.integers(1, 1000))
def test_only_outputs_and_samples_count(loops: ConvolutionLoops, samples: int) -> None:
    """PCL-DNN 3.1: comp / comm = 1.5 ow oh samples, for float32 and overlap 1."""
    down, right = loops.outputs
    assert flops_per_byte(loops, samples) == pytest.approx(1.5 * down * right * samples)
    assert flops_per_byte(loops, samples, overlap=0) == pytest.approx(0.75 * down * right * samples)


def test_the_first_layer_has_two_passes() -> None:
    assert step_flops(C5, 4, first=True) / step_flops(C5, 4) == pytest.approx(2 / 3)
