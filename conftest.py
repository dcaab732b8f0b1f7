"""For the tests of all packages; what fixtures tests/ shares is in tests/conftest.py."""

pytest_plugins = ["tests.cpu_budget", "miles_megatron.testing.fixtures"]
