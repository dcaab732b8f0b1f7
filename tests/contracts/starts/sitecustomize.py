"""Ends every process of tests/contracts/test_scripts.py once it has its plan, and writes down what became of it.

Python imports this file at the start of a process that has the folder on its path, so it also reaches the runs that a
script starts. They end with status 3: a script that compares several runs goes on to the next.
"""

import json
import os
import sys

from miles_core.errors import MilesError
from miles_core.plugins import plan

_prepare = plan.prepare


def prepare(*args, **options):
    try:
        _prepare(*args, **options)
        outcome = "planned"
    except MilesError as error:
        outcome = f"refused: {error}"
    with open(os.environ["MILES_TEST_STARTS"], "a", encoding="utf-8") as file:
        file.write(json.dumps([sys.argv[1:], outcome]) + "\n")
    sys.stdout.flush()
    os._exit(3)


plan.prepare = prepare
