"""The processes that these tests start are the command itself, so coverage is measured there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True, scope="module")
def _measured(coverage_config: str | None) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if coverage_config is not None:
            patch.setenv("COVERAGE_PROCESS_CONFIG", coverage_config)
        yield
