"""The page about the papers is what its data give, and so is its chart."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def papers() -> ModuleType:
    spec = importlib.util.spec_from_file_location("papers_page", DOCS / "papers.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["papers_page"] = module
    spec.loader.exec_module(module)
    return module


def test_the_page_is_that_of_the_data(papers: ModuleType) -> None:
    assert papers.PAGE.read_text(encoding="utf-8") == papers.page()


def test_the_chart_has_a_claim_of_each_paper_and_its_numbers(papers: ModuleType) -> None:
    claims, drawn = papers.headlines(), papers.CHART.read_text(encoding="utf-8")
    assert {figure.paper for _, figure, _ in claims} == {"DIMD", "Theano-MPI", "PCL-DNN", "MXNET-MPI", "swCaffe"}
    for label, figure, row in claims:
        assert label.replace("&", "&amp;") in drawn
        for ours in (row.prediction.ours, row.prediction.fitted, papers.measured_of(figure, row)):
            if ours is not None:
                assert f" {papers.factor(row, ours):.2f}" in drawn
