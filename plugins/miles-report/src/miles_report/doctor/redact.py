"""Redact: text and values without secrets, for a file that leaves the machine.

Taken out are values of names that speak of a secret, values of such variables of this process's environment wherever
they appear, values of a run's secret options likewise, tokens of known shapes, user, password and signature in a URL,
headers of authorization, private keys, and the user's name in a home directory. It is better to take out too much
than too little.
"""

from __future__ import annotations

import getpass
import json
import os
import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from urllib.parse import quote

from miles_core.config.tables import TABLES

GONE = "<redacted>"

SECRET = {"token", "key", "secret", "password", "passwd", "passphrase", "pwd", "credential", "credentials", "auth",
          "authorization", "apikey", "cookie", "session", "bearer", "dsn", "signature"}
"""Words of a name whose value is kept to oneself."""

LOUD = re.compile(r"TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIAL|AUTH|COOKIE")
"""The same in the name of an environment variable, in any place."""

SHAPES = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
    r"|\bhf_(?:(?=[a-z]*[A-Z0-9])[A-Za-z0-9]{8,}|[a-z]{16,})"  # not hf_checkpoint
    r"|\b(?:sk-|ghp_|gho_|ghu_|ghs_|ghr_|github_pat_|glpat-|npm_|xox[abprs]-|r8_|nvapi-|gsk_|wandb_v1_|AIza|ya29\.)"
    r"[A-Za-z0-9_\-.]{8,}"
    r"|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"
    r"|\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*", re.DOTALL)
"""Tokens of Hugging Face, OpenAI, GitHub, GitLab, Slack, Google, AWS and others, and JSON web tokens."""

HEADER = re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{6,}")
AUTHORIZATION = re.compile(r"(?i)\b((?:proxy-)?authorization['\"]?\s*[:=]\s*['\"]?)[^'\"\n,}]+")
URL = re.compile(r"\b([a-zA-Z][a-zA-Z0-9+.-]*://)[^\s/'\"]+@")
QUERY = re.compile(r"(?i)([?&;](?:[\w.-]*(?:signature|token|secret|credential|passw|key)[\w.-]*|sig|auth|code|pwd)=)"
                   r"[^&#\s'\"<>)\]}]+")
"""A parameter of a signed URL, such as S3's X-Amz-Signature and Azure's sig."""
HOME = re.compile(r"(/home/|/Users/)[^/\s'\",:;)\]}]+")
NAME = re.compile(r"(?i)[\w.-]*(?:token|key|secret|passw|passphrase|pwd|credential|auth|cookie|session|dsn|signature)"
                  r"[\w.-]*")
VALUE = re.compile(
    r"(?P<between>\\?['\"]?(?:\s*[=:]\s*|\s+)(?:b(?=['\"]))?)"
    r"(?P<value>\\\"(?:[^\"\\\n]|\\[^\"])*\\\"|\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)*'|[^\s,;&)\]}'\"]+)")
"""What may follow a name: NAME=value, "name": "value", --name value."""

NUMBER = re.compile(r"-?[\d.]{1,9}")
"""Counts of tokens are no secrets."""

_OWN = frozenset(field.name for table in TABLES.values() for field in fields(table))
"""Options of the core, of which none holds a secret: input_key, max_tokens_per_gpu."""


class Redactor:
    """Takes secrets out.

    Args:
        environment: variables whose values are to be taken out, where their names say so.
        home, user: of whoever packs; the name is taken out as a part of any path.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ, home: str | None = None, user: str | None = None):
        self._keys: dict[str, str] = {}
        values = {value for name, value in environment.items() if LOUD.search(name.upper()) and len(value) >= 6}
        self._values: list[str] = []
        self._take_out(values)
        home = str(Path.home()) if home is None else home
        self._home = None if home in ("/", "") else re.compile(re.escape(home) + r"(?=/|\b)")
        user = _user() if user is None else user
        self._user = re.compile(rf"(?<=/){re.escape(user)}(?=/|\s|$)") if len(user) > 2 and user != "root" else None

    def learn(self, options: Mapping[str, object]) -> None:
        """Take out the values of these options as well, wherever they appear, where their names say so."""
        self._take_out({str(value) for name, option in options.items() if is_secret(name)
                        for value in (option if isinstance(option, list) else [option])
                        if isinstance(value, str) and len(value) >= 6})

    def _take_out(self, values: set[str]) -> None:
        forms = {form for value in values for form in (value, quote(value, safe=""), json.dumps(value)[1:-1])}
        self._values = sorted({*self._values, *forms}, key=len, reverse=True)

    def text(self, text: str) -> str:
        """A text without secrets."""
        for value in self._values:
            text = text.replace(value, GONE)
        text = SHAPES.sub(GONE, text)
        text = URL.sub(rf"\1{GONE}@", text)
        text = QUERY.sub(rf"\1{GONE}", text)
        text = AUTHORIZATION.sub(rf"\1{GONE}", text)
        text = HEADER.sub(rf"\1 {GONE}", text)
        text = _pairs(text)
        if self._home is not None:
            text = self._home.sub("~", text)
        text = HOME.sub(r"\1USER", text)
        return text if self._user is None else self._user.sub("USER", text)

    def value(self, value: object, name: str = "") -> object:
        """A value of JSON without secrets; `name` is its key."""
        if isinstance(value, Mapping):
            return {self._key(str(key)): self.value(item, str(key)) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.value(item, name) for item in value]
        if isinstance(value, str):
            return GONE if value and is_secret(name) and not _counts(name, value) else self.text(value)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return GONE if number and is_secret(name) and not _counts(name, str(value)) else value

    def _key(self, name: str) -> str:
        if name not in self._keys:  # the names of metrics come again in every event
            self._keys[name] = self.text(name)
        return self._keys[name]


def is_secret(name: str) -> bool:
    """Whether the value of that name is kept to oneself."""
    bare = name.rpartition(".")[2].strip("-").replace("-", "_")
    if bare in _OWN:
        return False
    if bare.isupper():
        return bool(LOUD.search(bare))
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", bare).lower().split("_")
    return bool(SECRET.intersection(words)) and words[-1] not in ("id", "ids", "count", "path")


def _pairs(text: str) -> str:
    """A text without the values of names that speak of a secret."""
    pieces, at = [], 0
    for name in NAME.finditer(text):
        secret = _value(text, name)
        if secret is None or secret.end() <= at:
            continue
        # What was taken for a value may be the next name: "--key HF_TOKEN: x".
        begin = max(at, secret.start("value"))
        quote = re.match(r"\\?['\"]", secret["value"]) if begin == secret.start("value") else None
        pieces += [text[at:begin], quote[0] if quote else "", GONE, quote[0] if quote else ""]
        at = secret.end()
    return "".join([*pieces, text[at:]])


def _value(text: str, name: re.Match) -> re.Match | None:
    """The value that follows a name, if the name speaks of a secret."""
    match = VALUE.match(text, name.end()) if is_secret(name[0]) else None
    if match is None or _counts(name[0], match["value"]):
        return None
    assigned = set("=:").intersection(match["between"]) or name[0].startswith("-")
    return match if assigned else None  # else it is prose: "the key value"


def _counts(name: str, value: str) -> bool:
    """Whether it is a number of tokens or keys."""
    return bool(NUMBER.fullmatch(value)) and bool(re.search(r"(?i)token|key", name)) and not name.isupper()


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container without a name for the id
        return ""
