"""The nine stages, in order: prompts, rollout, reward, filter, buffer, advantage, loss, step, sync.

Each module holds its stage's contract and, where one exists, the default. No stage imports another; only
miles_core.loop knows the order.
"""
