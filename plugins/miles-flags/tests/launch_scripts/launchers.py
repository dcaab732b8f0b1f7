"""Development script that adds launchers in Python to scripts.json; no test runs it:   python launchers.py MILES

MILES is a checkout. Each file of its scripts/ and examples/ that calls execute_train is imported in a process of its
own, in which commands are recorded and not run and packages that only a cluster has are empty, and its training is
started with its defaults.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

ABSENT = ("ray", "sglang", "sglang_router", "megatron", "torch_memory_saver", "wandb", "mbridge", "verifiers")
ENTRIES = ("execute", "train", "_execute_train", "run", "launch")
CHOSEN = {"run_deepseek_v4.py": {"model_name": "DeepSeek-V4-Flash-FP8"}, "run_deepseek_v32.py": {"num_nodes": 16},
          "run-glm47-flash-agentic-async.py": {"num_nodes": 2}}
"""Arguments of launchers whose defaults are none that they take."""


class Empty(ModuleType):
    """A module of which everything can be imported, and called as a decorator."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return Empty(f"{self.__name__}.{name}")

    def __call__(self, *given: object, **named: object) -> object:
        return given[0] if len(given) == 1 and not named else self


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds empty packages."""

    def find_spec(self, name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] in ABSENT else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing."""


def submitted(folder: Path, launcher: Path) -> str:
    """The first command that a launcher would submit. Changes this process for good."""
    commands: list[str] = []

    def record(command: str | list[str], capture_output: bool = False, **more: object) -> str:
        commands.append(command if isinstance(command, str) else " ".join(command))
        return "1000000"  # of whatever is counted

    sys.path[:0] = [str(folder), str(launcher.parent)]
    sys.meta_path.insert(0, Finder())
    os.environ.update(MASTER_ADDR="10.0.0.1", WANDB_API_KEY="key", NCCL_NVLS_ENABLE="0")
    shell = ModuleType("miles.utils.external_utils.exec_command")
    vars(shell).update({f"exec_command_{kind}": record for kind in ("cpu", "gpu", "multi_node")})
    sys.modules[shell.__name__] = shell
    tools = importlib.import_module("miles.utils.external_utils.command_utils")
    tools.create_run_id = lambda: "run"
    subprocess.run = lambda command, *more, **named: subprocess.CompletedProcess(command, 0, record(command), "")
    time.sleep = os.makedirs = Path.mkdir = Path.write_text = lambda *given, **named: None
    spec = importlib.util.spec_from_file_location("launcher", launcher)
    sys.modules["launcher"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = [command for command in commands if "train.py" in command or "train_async.py" in command]
    for entry in ENTRIES if not found else ():
        function = getattr(module, entry, None)
        if function is not None and not found:
            takes = inspect.signature(function).parameters
            function(*([module.ScriptArgs(**CHOSEN.get(launcher.name, {}))] if takes else []))
            found = [command for command in commands if "train.py" in command or "train_async.py" in command]
    return found[0]


def main(folder: Path) -> None:
    """Add what launchers submit to the scripts of radixark/miles."""
    made = Path(__file__).with_name("scripts.json")
    text = made.read_text(encoding="utf-8")
    entries = json.loads(text)["radixark/miles"]["scripts"]
    rows = []
    for launcher in sorted({*folder.glob("scripts/**/*.py"), *folder.glob("examples/**/*.py")}):
        path = str(launcher.relative_to(folder))
        if path in entries or "execute_train(" not in launcher.read_text(encoding="utf-8"):
            continue
        child = subprocess.run([sys.executable, __file__, str(folder), str(launcher)], capture_output=True, text=True,
                               check=False, timeout=120)
        command = child.stdout.partition("SUBMITTED ")[2].strip()
        if not command:
            print("nothing submitted:", path, child.stderr[-200:], file=sys.stderr)
            continue
        words = re.sub(re.escape(str(folder.resolve())), "/root/source", command)
        words = shlex.split(words)
        start = next(i for i, word in enumerate(words) if word.endswith(("train.py", "train_async.py")))
        words = [Path(words[start]).name, *words[start + 1:]]
        rows.append(f"    {json.dumps(path)}: {json.dumps(shlex.join(words))}")
    first = text.index('"scripts": {\n') + len('"scripts": {\n')
    made.write_text(text[:first] + ",\n".join(rows) + ",\n" + text[first:], encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) == 3:
        print("SUBMITTED", submitted(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()))
    else:
        main(Path(sys.argv[1]))
