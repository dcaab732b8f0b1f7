"""miles doctor: what is wrong with a run, from the files of its run directory alone.

    record.py     what the files say: plan, events, metrics, samples, logs
    finding.py    what a rule says
    rollout.py, engine.py, training.py, system.py    the rules, by the side that they speak of
    rules.py      the table of them, and `examine`, which asks them all
    bundle.py     the run as one file to send around; redact.py takes secrets out of it
"""
