"""Development script that wrote scripts.json; no test runs it:   python extract.py FOLDER_OF_MILES FOLDER_OF_SLIME

Each shell script under scripts/ and examples/ that starts train.py or train_async.py is executed by bash up to `ray job
submit`, with every program but a few text filters replaced by nothing, and the words it would submit are recorded.
launchers.py adds those that are written in Python. Folders are checkouts or unpacked archives; a file COMMIT in each
names the commit.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

FILTERS = ("awk", "basename", "cat", "cut", "dirname", "envsubst", "grep", "head", "sed", "seq", "tail", "tr", "wc")
PROLOGUE = r"""
recorded() {
  local found=""
  for word in "$@"; do
    [ -n "$found" ] && printf '%s\0' "$word" >> "$RECORD"
    case "$word" in
      *train.py|*train_async.py) [ -z "$found" ] && found=1 && printf '%s\0' "${word##*/}" >> "$RECORD";;
    esac
  done
  [ -n "$found" ] && kill -9 $TOP
  return 0
}
python3() {
  case "$1" in
    *model_args_utils.py) "$REAL_PYTHON" "$@";;
    -c) echo 100000;;
    *) recorded "$@";;
  esac
}
python() { python3 "$@"; }
pip() { echo "megatron-core 0.16 /root/Megatron-LM"; }
mktemp() { echo /root/out/made.yaml; }
command_not_found_handle() { [ "$1" = ray ] && recorded "$@"; [ "$1" = nohup ] && recorded "$@"; return 0; }
export -f recorded python3 python pip mktemp command_not_found_handle
export TOP=$$
"""
# Where scripts look for models/ of their own repository, and where it is.
ELSEWHERE = re.compile(r"/root/(slime|miles)/scripts/|[$]\{SCRIPT_DIR\}/(\.\./)?scripts/(?=models)")
POSITIONAL = {"glm5-disagg-profile": ["GLM-5", "broadcast", "0", "10.0.0.1"],
              "-profile": ["broadcast", "0", "10.0.0.1"], "multi-node": ["broadcast", "0"]}
REPOSITORIES = ("radixark/miles", "THUDM/slime")


def words_of(script: Path, folder: Path, scratch: Path) -> list[str]:
    """The words of the first training that a script would start, the name of the program first."""
    text = ELSEWHERE.sub(f"{folder.resolve()}/scripts/", script.read_text(encoding="utf-8"))
    text = re.sub(r"(cat.*> *)\S+", r"\1/dev/null", text)  # files that a script writes are not needed
    text = re.sub(r"2>&1 [|] *tee.*", "", text)
    # One script of slime lacks the backslash that its command goes on after.
    text = re.sub(r"(?m)^(   --update-weight-buffer-size .*[^\\\s]) *$", r"\1 \\", text)
    runnable = script.with_name("extracted-" + script.name)
    filters, record, prologue = scratch / "bin", scratch / "record", scratch / "prologue.sh"
    filters.mkdir(exist_ok=True)
    for name in FILTERS:
        if not (filters / name).exists() and (real := shutil.which(name)):
            (filters / name).symlink_to(real)
    record.write_bytes(b"")
    prologue.write_text(PROLOGUE)
    given = next((words for part, words in POSITIONAL.items() if part in script.name), [])
    env = {"PATH": str(filters), "BASH_ENV": str(prologue), "RECORD": str(record), "REAL_PYTHON": sys.executable,
           "HOME": "/root", "BASE_DIR": "/root", "BASE_FOLDER": "/root", "MASTER_ADDR": "10.0.0.1",
           "WANDB_API_KEY": "key", "WANDB_KEY": "key", "OUTPUT_DIR": str(scratch), "PYTHONDONTWRITEBYTECODE": "1"}
    runnable.write_text(text, encoding="utf-8")
    try:
        subprocess.run(["/bin/bash", str(runnable), *given], env=env, cwd=scratch, timeout=20, check=False,
                       stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=(scratch / "stderr").open("w"))
    finally:
        runnable.unlink()
    return [word.replace(str(scratch), "/root/out") for word in record.read_text().split("\0")[:-1]]


def main(*folders: str) -> None:
    found: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        for repository, folder in zip(REPOSITORIES, map(Path, folders), strict=True):
            entries: dict[str, list[str]] = {}
            for script in sorted(folder.rglob("*.sh")):
                if not re.search(r"train(_async)?\.py", script.read_text(encoding="utf-8")):
                    continue
                words = words_of(script, folder, scratch)
                path = str(script.relative_to(folder))
                if not words:
                    print("nothing submitted:", path, (scratch / "stderr").read_text()[-300:], file=sys.stderr)
                    continue
                entries[path] = [re.sub(f"^{re.escape(str(folder.resolve()))}", "/root/source", word) for word in words]
            found[repository] = {"commit": (folder / "COMMIT").read_text().strip(), "scripts": entries}
            named = {word for words in entries.values() for word in words if word.endswith(".yaml")}
            found[repository]["files"] = {word: text for word in sorted(named)
                                          if (text := read(word, folder)) is not None}
    lines = []
    for repository, entry in found.items():
        rows = ",\n".join(f"    {json.dumps(path)}: {json.dumps(shlex.join(words))}"
                          for path, words in entry["scripts"].items())
        lines.append(f'{json.dumps(repository)}: {{\n  "commit": "{entry["commit"]}",\n  "scripts": {{\n{rows}\n  }},\n'
                     f'  "files": {json.dumps(entry["files"])}\n}}')
    Path(__file__).with_name("scripts.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def read(word: str, folder: Path) -> str | None:
    """A YAML file of the repository that a script names, perhaps by where it copies it to, without its comments."""
    for path in sorted(folder.rglob(Path(word).name)):
        if word.startswith("/root/out/") or word.endswith(str(path.relative_to(folder))):
            text = path.read_text(encoding="utf-8").replace("${DATA_DIR}", "/root/data")
            return "\n".join(line for line in re.sub(r"(?m)(^|\s)#.*$", "", text).splitlines() if line.strip()) + "\n"
    return None


if __name__ == "__main__":
    os.umask(0o022)
    main(*sys.argv[1:])
