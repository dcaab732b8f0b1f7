"""What every plugin of Miles holds to."""

from miles_testing import plugin_contract

TestContract = plugin_contract("{{ cookiecutter.__name }}")
