"""Teachers behind SGLang servers: one POST /generate scores a finished sample, without a token being generated.

    {"input_ids": [...], "sampling_params": {"max_new_tokens": 0, "temperature": 0},
     "return_logprob": true, "logprob_start_len": 0, "top_logprobs_num": k}

answers with meta_info.input_token_logprobs, [log-prob, id, text] of each input token, the first without a number, and
with meta_info.input_top_logprobs, k such triples for each. With "token_ids_logprob": [ids] there is
meta_info.input_token_ids_logprobs too, at each position a triple of every id. Both begin at logprob_start_len.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from miles_core.errors import ConfigError, RewardError
from miles_core.hosts import in_daemon_thread
from miles_core.types import images_of

if TYPE_CHECKING:
    from miles_core.types import Sample

DEFAULT = "default"
PAUSE = 0.5
"""Seconds before the second attempt, and twice as many before each further one."""
WINDOW = 32
"""Response tokens per question about candidates. A server answers at each position about every id that it is asked
about, so that answers about a whole response would grow with the square of its length."""


class Servers:
    """The teachers of a run.

    Args:
        urls: one URL, or NAME=URL for several teachers.
        key: of a prompt's metadata that names its teacher.
        timeout: seconds for one request, retries included.
        top_k: likeliest tokens to ask for at each position; 0 for none.
        concurrency: requests under way at once.

    Raises:
        ConfigError: an invalid address, or two of one name.
    """

    def __init__(self, urls: Sequence[str], *, key: str, timeout: float, top_k: int, concurrency: int):
        self.urls = addresses(urls)
        self._key, self._timeout, self._top_k = key, timeout, top_k
        self._slots = asyncio.Semaphore(concurrency)

    async def score(self, sample: Sample) -> dict[str, np.ndarray]:
        """The sample's columns from its teacher: teacher_log_probs [R], with top-k its likeliest tokens and theirs.

        Raises:
            RewardError: no such teacher, no answer in time, or one that is not about these tokens.
        """
        url = self._url(sample)
        payload = _payload(sample.tokens, 0) | ({"top_logprobs_num": self._top_k} if self._top_k else {})
        async with self._slots:
            answer = await in_daemon_thread(lambda: post(url, payload, self._timeout))
        return read(answer, sample, self._top_k, url)

    def score_tokens(self, sample: Sample, tokens: np.ndarray) -> np.ndarray:
        """Log-probs [R, k] of any tokens [R, k] in place of the sample's; 0 where it is not trained on.

        The requests follow each other, so that each finds what comes before its positions in the server's cache.

        Raises:
            RewardError: as `score`.
        """
        url, log_probs = self._url(sample), np.zeros(tokens.shape, np.float32)
        trained, prompt = sample.columns["loss_mask"] > 0, sample.length - sample.response_length
        for begin in range(0, len(tokens), WINDOW):
            rows = begin + np.flatnonzero(trained[begin:begin + WINDOW])
            if not rows.size:
                continue
            first, end = prompt + int(rows[0]), prompt + int(rows[-1]) + 1
            candidates = np.unique(tokens[rows])
            # What is said about a token is predicted at the one before it.
            payload = _payload(sample.tokens[:end], first - 1) | {"token_ids_logprob": candidates.tolist()}
            answer = post(url, payload, self._timeout)
            scored = read_tokens(answer, sample, candidates, (first, end), url)[rows - rows[0]]
            log_probs[rows] = np.take_along_axis(scored, np.searchsorted(candidates, tokens[rows]), 1)
        return log_probs

    def _url(self, sample: Sample) -> str:
        if images_of(sample.prompt, sample):
            raise RewardError(f"{sample.name} has images, and a teacher's server is sent tokens alone",
                              who="plugin opd", code="opd-images-unseen",
                              fix="--opd-teacher-load: a teacher in the trainer sees them")
        name = str({**sample.prompt.metadata, **sample.metadata}.get(self._key, DEFAULT))
        if name not in self.urls:
            raise RewardError(f"{sample.name} names an unknown teacher", got=name, who="opd.opd_teacher_urls",
                              fix=f"add {name}=URL; known: {', '.join(self.urls)}", code="opd-teacher-unknown")
        return self.urls[name]


def addresses(texts: Sequence[str]) -> dict[str, str]:
    """NAME=URL, or one URL for the teacher called default -> URL of /generate by name."""
    urls: dict[str, str] = {}
    for text in texts:
        match = re.fullmatch(r"(?:([\w.-]+)=)?(https?://\S+)", text)
        if match is None:
            raise ConfigError("not the address of a teacher", got=text, who="opd.opd_teacher_urls",
                              fix="write http://HOST:PORT, or NAME=http://HOST:PORT", code="opd-address-malformed")
        name, url = match[1] or DEFAULT, match[2].rstrip("/").removesuffix("/generate")
        if name in urls:
            raise ConfigError(f"two addresses for the teacher {name!r}", got=text, who="opd.opd_teacher_urls",
                              fix="give each teacher its own name: NAME=URL", code="opd-address-twice")
        urls[name] = f"{url}/generate"
    return urls


def post(url: str, payload: dict[str, Any], timeout: float) -> dict[str, Any]:
    """The JSON answer; connections that fail and answers of status 5xx are tried again while there is time.

    Raises:
        RewardError: none within `timeout` seconds, a refusal, or no JSON.
    """
    deadline, pause = time.monotonic() + timeout, PAUSE
    request = urllib.request.Request(url, json.dumps(payload).encode(), {"Content-Type": "application/json"})
    while True:
        try:
            with urllib.request.urlopen(request, timeout=max(0.01, deadline - time.monotonic())) as answer:
                parsed: dict[str, Any] = json.load(answer)
                return parsed
        except (OSError, ValueError) as error:  # URLError and HTTPError are OSErrors
            refused = isinstance(error, ValueError) or getattr(error, "code", 500) < 500
            if refused or time.monotonic() + pause >= deadline:
                detail = error.read()[:200].decode(errors="replace") if hasattr(error, "read") else ""
                raise RewardError("the teacher's server returned no answer", code="opd-server-no-answer", who=url,
                                  got=f"{error} {detail}".strip(),
                                  fix=f"look at its log; it had {timeout:g} s (opd_teacher_timeout)") from error
        time.sleep(pause)
        pause *= 2


def read(answer: dict[str, Any], sample: Sample, top_k: int, url: str) -> dict[str, np.ndarray]:
    """The columns in a server's answer; R rows, the prompt's left out.

    Raises:
        RewardError: it is not about the sample's tokens, or holds something else than finite numbers.
    """
    size, rows = sample.response_length, slice(sample.length - sample.response_length, None)
    with _usable(sample, url):
        scored = answer["meta_info"]["input_token_logprobs"]
        _same([entry[1] for entry in scored], sample.tokens)
        columns: dict[str, np.ndarray] = {
            "teacher_log_probs": np.array([entry[0] for entry in scored[rows]], np.float32).reshape(size),
        }
        if top_k:
            best = [entries[:top_k] for entries in answer["meta_info"]["input_top_logprobs"][rows]]
            log_probs, tokens = ([[entry[i] for entry in row] for row in best] for i in (0, 1))
            columns["opd_teacher_top"] = np.array(log_probs, np.float32).reshape(size, top_k)
            columns["opd_teacher_tokens"] = np.array(tokens, np.int32).reshape(size, top_k)
        _finite(*columns.values())
    return columns


def read_tokens(answer: dict[str, Any], sample: Sample, candidates: np.ndarray, span: tuple[int, int],
                url: str) -> np.ndarray:
    """Log-probs [N, C] of C ids in place of each of N tokens of a sample.

    Args:
        span: the first of these tokens and the one after the last.

    Raises:
        RewardError: it is about something else, or holds something else than finite numbers.
    """
    first, end = span
    with _usable(sample, url):
        scored, rows = (answer["meta_info"][f"input_{name}_logprobs"][1:] for name in ("token", "token_ids"))
        _same([entry[1] for entry in scored], sample.tokens[first:end])
        for row in rows:
            _same([entry[1] for entry in row], candidates)
        log_probs = np.array([[entry[0] for entry in row] for row in rows], np.float32)
        log_probs = log_probs.reshape(end - first, len(candidates))
        _finite(log_probs)
    return log_probs


def _payload(tokens: np.ndarray, start: int) -> dict[str, Any]:
    return {"input_ids": tokens.tolist(), "sampling_params": {"max_new_tokens": 0, "temperature": 0},
            "return_logprob": True, "logprob_start_len": start}


@contextmanager
def _usable(sample: Sample, url: str) -> Iterator[None]:
    """
    Raises:
        RewardError: in place of what goes wrong while an answer is read.
    """
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise RewardError(f"the teacher's answer for {sample.name} cannot be used", who=url,
                          got=f"{type(error).__name__}: {error}"[:200], code="opd-server-answer-invalid",
                          fix="use an SGLang server with the student's tokenizer") from error


def _same(found: Sequence[int], sent: np.ndarray) -> None:
    """SGLang calls the last id of the vocabulary 0 where it repeats what it was sent."""
    if len(found) != len(sent) or any(one not in (0, other) for one, other in zip(found, sent.tolist(), strict=True)):
        raise ValueError(f"log-probs of {len(found)} other tokens than the {len(sent)} that were sent")


def _finite(*columns: np.ndarray) -> None:
    if not all(np.isfinite(values).all() for values in columns):
        raise ValueError("log-probs that are not finite")
