from functools import partial

from miles_core.testing import canned_samples, plugin_contract

TestContract = plugin_contract("ppo", samples=partial(canned_samples, columns={"values": 0.5}))
