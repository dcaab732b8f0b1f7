from functools import partial

from miles_testing import canned_samples, plugin_contract, tiny_checkpoint

TestContract = plugin_contract(
    "opd", options={"opd_teacher_load": str(tiny_checkpoint()), "rollout.rm_type": ["toy"]}, without=["reward"],
    samples=partial(canned_samples, columns={"teacher_log_probs": -1.0, "opd_reverse_kl": 0.1}))  # fmt: skip
