"""pytest fixtures that tests of trainer plugins share; the conftest.py of the root loads them.

    pytest_plugins = ["miles_megatron.testing.fixtures"]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from miles_megatron.testing.ranks import Ranks, by_size


@pytest.fixture(scope="session")
def ranks_of() -> Iterator[Callable[[int], Ranks]]:
    """size -> Ranks, started when first asked for: what they import, all tests of this process have once."""
    with by_size() as started:
        yield started


@pytest.fixture(scope="session")
def one(ranks_of: Callable[[int], Ranks]) -> Ranks:
    """One rank."""
    return ranks_of(1)


@pytest.fixture(scope="session")
def two(ranks_of: Callable[[int], Ranks]) -> Ranks:
    """Two ranks."""
    return ranks_of(2)


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
