from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_rule_in_the_docs_is_the_one_that_is_tested() -> None:
    rule = (ROOT / "tests/rules/largest.py").read_text(encoding="utf-8").split('"""\n\n', 1)[1].rstrip()
    assert f"```python\n{rule}\n```" in (ROOT / "docs/rules.md").read_text(encoding="utf-8")
    assert sum(1 for line in rule.splitlines() if line) <= 30
