from functools import partial

from miles_testing import canned_samples, plugin_contract

TestContract = plugin_contract("ppo", samples=partial(canned_samples, columns={"values": 0.5}))
