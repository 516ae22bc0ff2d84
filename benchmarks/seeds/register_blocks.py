"""Efficiency of the innermost loops of a convolution, by the registers that they sum into: PCL-DNN section 2.4.

A core of an E5 v3 starts 2 fused multiply-adds and 2 loads a cycle, and 1 store; a product is there after 5 cycles. So
10 independent sums hide that latency, and of the 16 registers one holds a weight: 10 to 15 sums.

    forward, grad_input                                  R = rows * columns sums, each a vector of SW output channels
      load R sums                    R / 2 cycles
      for SW inputs, kh x kw:        load a vector of weights, 1 / 2 cycle;  R products, R / 2 cycles
      store R sums                   R cycles

    efficiency = products / (products + loads and stores)
               = (SW kh kw R / 2) / (SW kh kw R / 2 + (R + SW kh kw) / 2 + R)

Worked example: OverFeat-FAST's C5 with 1 row of 12 columns, SW = 8, 3x3: 432 / (432 + 54) = 0.889; the section prints
88%. Its loop bounds, as printed, have one row of the kernel: 144 / (144 + 30) = 0.828.

    grad_weight                                          the sums are the kernel's elements, of c input channels
      for each of P outputs:         load a vector of the outputs' gradient, 1 / 2 cycle;  R products, max(R / 2, 5)
      load and store R sums, as above

    kernel      3x3              5x5              7x7              11x11
    R           3 columns * 4    5 columns * 2    7 columns * 2    11 columns * 1     the fewest channels with R >= 10
                = 12             = 10             = 14             = 11

Over the P = 144 outputs of C5 a 3x3 kernel alone (R = 9) is 0.80 efficient, a row of 4 channels (R = 12) 0.91. The
section gives these four blocks. For a 3x3 kernel alone it gives 75% without an equation; over one row of 12 outputs
ours gives 0.68.
"""

from __future__ import annotations

from typing import NamedTuple

from unisono.errors import UsageError


class CoreIssue(NamedTuple):
    """Instructions that a core starts in a cycle, and its vector registers; as given, those of an E5 v3."""

    products: int = 2
    loads: int = 2
    stores: int = 1
    latency: int = 5
    """Cycles until a product is there."""
    registers: int = 16
    simd_width: int = 8
    """Numbers in a vector register."""

    @property
    def least_sums(self) -> int:
        """Independent sums that hide the latency."""
        return self.products * self.latency

    @property
    def most_sums(self) -> int:
        """Sums that fit into the registers beside a weight."""
        return self.registers - 1


E5_V3 = CoreIssue()


def forward_efficiency(sums: int, kernel: tuple[int, int], core: CoreIssue = E5_V3) -> float:
    """Return the share of cycles with products in the forward pass or the gradient of the inputs.

    `sums` is rows x columns of a register block. Raises UsageError where they do not fit into the registers.

    >>> round(forward_efficiency(12, (3, 3)), 3)
    0.889
    """
    _check(sums, core)
    weights = core.simd_width * kernel[0] * kernel[1]
    products = weights * _product_cycles(sums, core)
    return weights * sums / core.products / (products + (sums + weights) / core.loads + sums / core.stores)


def grad_weight_efficiency(sums: int, outputs: int, core: CoreIssue = E5_V3) -> float:
    """Return the share of cycles with products in the gradient of the weights, over `outputs` outputs in a row.

    >>> round(grad_weight_efficiency(12, 144), 2)
    0.91
    """
    _check(sums, core)
    products = outputs * _product_cycles(sums, core)
    return outputs * sums / core.products / (products + (sums + outputs) / core.loads + sums / core.stores)


def grad_weight_channels(kernel_columns: int, core: CoreIssue = E5_V3) -> int:
    """Return the input channels whose kernel rows share a register block: the fewest that hide the latency, or as many
    as fit.

    >>> [grad_weight_channels(columns) for columns in (3, 5, 7, 11)]
    [4, 2, 2, 1]
    """
    _check(kernel_columns, core)
    return min(-(-core.least_sums // kernel_columns), core.most_sums // kernel_columns)


def _product_cycles(sums: int, core: CoreIssue) -> float:
    """Return the cycles of one product into each sum: those to start them, or the latency if that is longer."""
    return max(sums / core.products, core.latency)


def _check(sums: int, core: CoreIssue) -> None:
    if not 1 <= sums <= core.most_sums:
        raise UsageError(f"{sums} sums in registers; a core with {core.registers} has room for 1 to {core.most_sums}")
