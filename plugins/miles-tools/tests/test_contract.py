from functools import partial

from miles_testing import canned_samples, plugin_contract

TestContract = plugin_contract("tools", options={"rollout.generate": "agent", "agent_command": ["true"]},
                               samples=partial(canned_samples, rewards={"agent": 1.0}))
