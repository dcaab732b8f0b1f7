"""Shared by the tests of the command line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from miles_core.cli import cli, command_line

ROOT = Path(__file__).parents[3]


@pytest.fixture
def invoke(tmp_path, monkeypatch):
    """(argv) -> click's Result, in a folder of its own; errors that are no click errors are raised."""
    monkeypatch.chdir(tmp_path)

    def call(*argv: object) -> Result:
        return CliRunner().invoke(cli, [str(word) for word in argv], catch_exceptions=False)

    return call


@pytest.fixture
def call(tmp_path, monkeypatch, capfd):
    """(argv) -> (exit code, stdout, stderr) of what the console script runs, in this process."""
    monkeypatch.chdir(tmp_path)

    def run(*argv: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["miles", *map(str, argv)])
        code = 0
        try:
            command_line()
        except SystemExit as leave:
            code = leave.code or 0
        return code, *capfd.readouterr()

    return run
