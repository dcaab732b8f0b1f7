"""Judge: renders conversations by the reward model's own tokenizer, asks its servers, and reads what they answer.

A request that fails is sent again, to another server if there is one; after the last attempt the error names the
samples. An answer that holds no finite number is an error as well, never a reward of 0.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp

from miles_core.errors import DataError, RewardError
from miles_reward_model.checks import template
from miles_reward_model.group import ADDRESSES
from miles_reward_model.plugin import RewardModelOptions

if TYPE_CHECKING:
    from miles_core.types import Sample

PAUSE, LONGEST_PAUSE = 0.25, 8.0
"""Seconds before the second attempt; twice as many before each further one, up to the longest."""


class _Failed(Exception):
    """An attempt after which another may fare better."""


class Judge:
    """
    Args:
        run_dir: where the servers' addresses are (group.py).
        ends: what may be left at the end of an answer: the policy's special tokens, as text.

    Raises:
        DataError: the reward model's tokenizer cannot be loaded, or has no chat template.
    """

    def __init__(self, options: RewardModelOptions, run_dir: Path, ends: Sequence[str] = ()):
        from transformers import AutoTokenizer

        self._options, self._addresses, self._ends = options, run_dir / ADDRESSES, ends
        self._generative = options.reward_model_kind == "generative"
        self._template = template(options) if self._generative else ""
        self._turns, self._load = asyncio.Semaphore(options.concurrency), dict[str, int]()
        self._session: aiohttp.ClientSession | None = None
        self._closing: asyncio.Task[None] | None = None
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(options.reward_model_path, local_files_only=True)
        except Exception as error:  # the Rust half of a tokenizer raises what it likes
            raise self._untokenized(str(error)) from error
        if not self._tokenizer.chat_template:
            raise self._untokenized("it has no chat template")
        self._special = sorted(special_tokens(self._tokenizer))

    async def score(self, samples: Sequence[Sample]) -> list[float]:
        """A number for each sample.

        Raises:
            RewardError: names the samples that a server gave no number for.
        """
        size = 1 if self._generative else self._options.batch_size
        parts = [samples[i : i + size] for i in range(0, len(samples), size)]
        return [one for part in await asyncio.gather(*map(self._ask, parts)) for one in part]

    def close(self) -> None:
        """Close the connections; those of a loop that has ended are closed already."""
        session, self._session = self._session, None
        if session is not None:
            try:
                self._closing = asyncio.get_running_loop().create_task(session.close())
            except RuntimeError:
                return

    def token_ids(self, sample: Sample) -> list[int]:
        """What a server is given: the conversation with the answer, or the question about both."""
        prompt = sample.prompt
        turns: Sequence[Mapping[str, Any]] = prompt.messages or [{"role": "user", "content": prompt.text}]
        messages, answer = [{**one, "content": _text(one["content"])} for one in turns], self._answer(sample)
        if not self._generative:
            chat = [*messages, {"role": "assistant", "content": answer}]
        else:
            conversation = "\n".join(str(one["content"]) for one in messages)
            question = self._template.format(prompt=conversation, response=answer, label=prompt.label or "")
            chat = [{"role": "user", "content": question}]
        text = self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=self._generative)
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])  # the template writes its own

    def _answer(self, sample: Sample) -> str:
        """Its text without the token that ended it: the template writes its own, and a question would end there.

        A space breaks whatever else would become a special token: an answer shall not write the other side's turn.
        """
        text = sample.text.removesuffix(next(filter(sample.text.endswith, self._ends), ""))
        for token in self._special:
            text = text.replace(token, f"{token[0]} {token[1:]}")
        return text

    async def _ask(self, samples: Sequence[Sample]) -> list[float]:
        ids, last = [self.token_ids(sample) for sample in samples], "no attempt"
        async with self._turns:
            for attempt in range(self._options.retries + 1):
                if attempt:
                    await asyncio.sleep(min(PAUSE * 2 ** (attempt - 1), LONGEST_PAUSE))
                try:
                    return await self._attempt(ids, attempt)
                except (_Failed, aiohttp.ClientError, OSError, TimeoutError) as error:
                    last = f"{type(error).__name__.lstrip('_')}: {error}"
        names = samples[0].name + (f" and {len(samples) - 1} more" if len(samples) > 1 else "")
        raise RewardError(f"the reward model gave no reward for {names} in {self._options.retries + 1} attempts",
                          code="reward-model-retries-exhausted", got=last[:300],
                          who=str(self._options.reward_model_path),
                          fix="look at logs/reward-*.log in the run directory")

    async def _attempt(self, ids: list[list[int]], attempt: int) -> list[float]:
        url = self._server()
        self._load[url] = self._load.get(url, 0) + 1
        try:
            if not self._generative:
                answers = await self._post(f"{url}/classify", {"input_ids": ids})
                if not isinstance(answers, list) or len(answers) != len(ids):
                    raise _Failed(f"{str(answers)[:100]} is no list of {len(ids)} answers")
                return [self._of_class(answer) for answer in answers]
            # The first verdict is greedy. After an unreadable one another is drawn, which greedily would be the same.
            params = {"max_new_tokens": self._options.verdict_tokens, "temperature": 0.7 if attempt else 0.0}
            answer = await self._post(f"{url}/generate", {"input_ids": ids[0], "sampling_params": params})
            return [self._of_verdict(answer)]
        finally:
            self._load[url] -= 1

    def _server(self) -> str:
        """The address with the fewest requests of ours.

        Raises:
            RewardError: the group has given up.
        """
        try:
            known = json.loads(self._addresses.read_text())
        except FileNotFoundError:
            raise _Failed("no server has come up yet") from None
        if known["error"] is not None:
            raise RewardError("the reward model's servers have ended", code="reward-servers-ended", got=known["error"],
                              who=str(self._options.reward_model_path), fix="see the error of the server")
        if not known["urls"]:
            raise _Failed("all servers are being restarted")
        return str(min(known["urls"], key=lambda url: self._load.get(url, 0)))

    async def _post(self, url: str, body: dict[str, Any]) -> Any:
        if self._session is None:  # idle connections are kept for less than uvicorn's 5 s, which would close them
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0))
        bound = aiohttp.ClientTimeout(total=self._options.request_timeout)
        async with self._session.post(url, json=body, timeout=bound) as response:
            text = await response.text()
        if response.status != 200:
            raise _Failed(f"HTTP {response.status}: {text[:200]}")
        try:
            return json.loads(text)
        except ValueError:
            raise _Failed(f"an answer that is not JSON: {text[:100]}") from None

    def _of_class(self, answer: Any) -> float:
        try:
            return _finite(answer["embedding"][self._options.class_index or 0])
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise _Failed(f"no number in {str(answer)[:100]} ({type(error).__name__})") from None

    def _of_verdict(self, answer: Any) -> float:
        try:
            text = answer["text"]
            return _finite(list(re.finditer(self._options.score_pattern, text))[-1][1])
        except (KeyError, IndexError, TypeError, ValueError):
            raise _Failed(f"no score in {str(answer)[:200]}") from None

    def _untokenized(self, why: str) -> DataError:
        return DataError("the reward model's tokenizer cannot render a conversation", code="reward-tokenizer-unusable",
                         got=why.splitlines()[0][:200] if why else None, who=str(self._options.reward_model_path),
                         fix="put tokenizer.json, tokenizer_config.json and its chat template beside the weights")


def special_tokens(tokenizer: Any) -> tuple[str, ...]:
    """Those that transformers names, and further ones of the vocabulary."""
    added = (token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
    return tuple(filter(None, {*tokenizer.all_special_tokens, *added}))


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError("not finite")
    return number


def _text(content: Any) -> Any:
    """A message's content; of parts, their texts, and a mark where an image is, which these models do not see."""
    return "".join(part.get("text", "<image>") for part in content) if isinstance(content, list) else content
