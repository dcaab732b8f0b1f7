"""The contract that every Miles plugin must satisfy."""

from miles_testing import plugin_contract

TestContract = plugin_contract("{{ cookiecutter.__name }}")
