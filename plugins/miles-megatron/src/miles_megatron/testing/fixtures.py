"""pytest fixtures that tests of trainer plugins share; a conftest.py imports those that it wants.

    from miles_megatron.testing.fixtures import convert, one, two  # noqa: F401
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from miles_megatron.testing.ranks import Ranks


@pytest.fixture(scope="module")
def one() -> Iterator[Ranks]:
    """A process that is started once."""
    with Ranks(1) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    """Two of them."""
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture
def convert(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """(*words) -> what `miles convert` prints."""
    from miles_core.cli import cli
    from miles_megatron import cpu

    def run(*words: object) -> str:
        try:
            cli(["convert", *map(str, words)], standalone_mode=False)
        finally:
            cpu.leave()  # the command's process would end here
        return capsys.readouterr().out

    return run
