"""The Python in the pages on constraints and on LangChain runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.slow
@pytest.mark.parametrize(("page", "shows"), [("structured", "'name'"), ("langchain", "olour")])
def test_snippets_run(page, shows, smollm2_path, capsys):
    snippets = re.findall(r"^```python\n(.*?)^```", (DOCS / f"{page}.md").read_text(), re.M | re.S)
    assert snippets
    for snippet in snippets:
        exec(snippet, {})
    assert shows in capsys.readouterr().out


@pytest.mark.parametrize("page", ["structured", "langchain"])
def test_examples_and_pages_that_are_named_are_there(page):
    text = (DOCS / f"{page}.md").read_text()
    for name in re.findall(r"(?:examples|benchmarks|docs)/[\w*.]+", text):
        assert list(DOCS.parent.glob(name)), name
