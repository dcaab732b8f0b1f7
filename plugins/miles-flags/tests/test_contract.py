"""The list of flags as a plugin."""
from miles_testing import plugin_contract

TestContract = plugin_contract("flags")
