"""Check the answers before anything is written."""

import re
import sys

name, distribution = "{{ cookiecutter.__name }}", "{{ cookiecutter.distribution }}"
known = "{{ cookiecutter.__known }}".split()  # noqa: SIM905 - rendered
taken = "{{ cookiecutter.__taken }}".split()  # noqa: SIM905 - rendered
family = "{{ cookiecutter.family }}"
hooks = "{{ cookiecutter.hooks }}".replace(" ", "").split(",")

if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
    sys.exit(f"The name {name!r} should be lower-case letters and digits, with single dashes between: my-reward.")
if name in taken:
    sys.exit(f"The name {name} is already used by Miles or an official plugin.")
if distribution not in (f"miles-{name}", f"miles-plugin-{name}"):
    sys.exit(f"The distribution should be miles-{name} or miles-plugin-{name}.")
if not re.fullmatch(r"([a-z][a-z0-9_]*)?", family):
    sys.exit(f"The family {family!r} should be a model_type of config.json, such as seed_oss.")
if unknown := [hook for hook in hooks if hook not in known]:
    sys.exit(f"Unknown hook {unknown[0]!r}; choose from {', '.join(known)}.")
if len(set(hooks)) < len(hooks):
    sys.exit("A hook is listed twice.")
