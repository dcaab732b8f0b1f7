"""How functions of Miles ask the engine: as if it were a server whose address is in `args`.

The address is nobody's: `post` knows it and hands the request to the run's engine, whichever that is. So the draws have
their keys, the calls their bounds, and every token its weight version.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from miles_compat.args import HOST
from miles_core.errors import HookError

if TYPE_CHECKING:
    import numpy as np

    from miles_compat.args import Args
    from miles_core.stages.rollout import Generation, Response
    from miles_core.types import Prompt

WHO = "custom_generate_function_path"
TAKEN = frozenset({"temperature", "top_p", "top_k", "max_new_tokens", "stop", "stop_token_ids", "skip_special_tokens",
                   "ignore_eos", "min_new_tokens"})
LEFT = frozenset({"no_stop_trim", "spaces_between_special_tokens", "sampling_seed", "n"})
"""Sampling parameters that are what the core does anyway, or its own business."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """One answer of the engine, the whole context that it followed, and the temperature that it was drawn at.

    Args:
        columns: what plugins have read from it, where they did already.
    """

    input_ids: tuple[int, ...]
    response: Response
    temperature: float = 1.0
    columns: Mapping[str, np.ndarray] | None = None


@dataclass
class Session:
    """What one execution of a function asks of the engine.

    Args:
        name: token ids of a request -> (its name, the key of its draws).
        context: tokens that the model can hold.
        loop: that the engine belongs to; functions may ask from another one.
        prompt, index: of the sample that it makes, where it makes one.
        drawn: the engine's answers, in the order in which they came.
    """

    args: Args
    generation: Generation
    name: Callable[[Sequence[int]], tuple[str, int]]
    context: int
    prompt: Prompt | None = None
    index: int = 0
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    drawn: list[Drawn] = field(default_factory=list)

    async def ask(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        """`generate`, from whatever loop."""
        if asyncio.get_running_loop() is self.loop:
            return await self.generate(payload)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self.generate(payload), self.loop))

    async def generate(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        """SGLang's /generate: token ids, or text, to an answer of SGLang's form.

        Raises:
            HookError: neither, or a sampling parameter that is not known.
            EngineError: the engine failed.
        """
        from miles_core.stages.rollout import Request, call_engine

        ids = payload.get("input_ids")
        if ids is None:
            text = payload.get("text")
            if not isinstance(text, str):
                raise HookError("a request needs input_ids or text", got=", ".join(payload), who=WHO,
                                fix="pass the token ids so far as input_ids", code="engine-request-without-input")
            ids = self.args.tokenizer(text, add_special_tokens=False)["input_ids"]
        name, key = self.name(ids)
        sampling = replace(self.generation.sampling, **_sampling(payload.get("sampling_params") or {}))
        room = min(sampling.max_new_tokens, self.context - len(ids))
        if room <= 0:
            return _answer("", [], [], "length", len(ids), self.generation.engine.version)
        request = Request(name, tuple(map(int, ids)), replace(sampling, max_new_tokens=room), key)
        request = self.generation.on_request(request)
        response = await call_engine(self.generation, request)
        self.drawn.append(Drawn(request.input_ids, response, sampling.temperature))
        return _answer(response.text, response.output_ids.tolist(), response.log_probs.tolist(),
                       response.finish_reason, len(ids), int(response.versions[-1]) if len(response.versions) else 0)


CURRENT: ContextVar[Session] = ContextVar("the execution of a function that is under way")


async def post(url: str, payload: Mapping[str, Any], max_retries: int = 1, action: str = "post",
               headers: Mapping[str, str] | None = None) -> Any:
    """Miles's `post`: JSON to a URL, JSON back. The engine's address leads to the engine, any other to that server.

    Raises:
        HookError: a request to the engine outside of a function that may ask it, or another than /generate.
    """
    where, session = urlsplit(url), CURRENT.get(None)
    if where.hostname != HOST:
        return await _elsewhere(url, payload, action, headers)
    if where.path == "/abort_request":  # what is not used is thrown away by the run itself
        return {}
    if where.path != "/generate":
        raise HookError("the engine answers /generate alone", code="engine-path-unsupported", who="post",
                        got=where.path or url, fix="send token ids or text to /generate; an agent that chats is a "
                        "function of --custom-agent-function-path, which is given a URL for OpenAI's protocol")
    if session is None:
        raise HookError("the engine is asked by nothing that the run waits for", code="engine-asked-outside",
                        who="post", got="no generate function and no rollout function is under way in this thread",
                        fix="await the answer within the function; in a thread ask by asyncio.to_thread, as "
                        "run_in_executor does not say for whom; how far sampling runs ahead of training is --max-lag")
    return await session.ask(payload)


async def get(url: str) -> Any:
    """JSON from a URL. Of the engine: /workers and /list_workers, which name it."""
    where = urlsplit(url)
    if where.hostname == HOST and where.path in ("/workers", "/list_workers"):
        address = f"http://{HOST}:0"
        return {"workers": [{"url": address}], "urls": [address]}
    return await _elsewhere(url, None, "get", None)


async def wait_http_ok(url: str, *, json_payload: object = None, timeout: float = 180.0,
                       request_timeout: float = 60.0) -> None:
    """Wait until a server answers.

    Raises:
        TimeoutError: it does not.
    """
    if urlsplit(url).hostname == HOST:
        return
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout
    while True:
        try:
            await _elsewhere(url, json_payload, "get" if json_payload is None else "post", None, request_timeout)
            return
        except (OSError, ValueError) as error:
            if isinstance(error, ValueError):
                return  # it answered, with something else than JSON
            if loop.time() > deadline:
                raise TimeoutError(f"{url} did not answer within {timeout:g} s") from error
        await asyncio.sleep(1.0)


def _sampling(given: Mapping[str, Any]) -> dict[str, Any]:
    """
    Raises:
        HookError: a parameter that nothing here stands for.
    """
    if unknown := given.keys() - TAKEN - LEFT:
        raise HookError("a request has a sampling parameter that is not known here",
                        code="engine-sampling-parameter-unknown", got=", ".join(sorted(unknown)), who=WHO,
                        fix=f"leave it out; there are {', '.join(sorted(TAKEN))}")
    found = {name: value for name, value in given.items() if name in TAKEN and value is not None}
    for name in ("stop", "stop_token_ids"):
        if name in found:
            found[name] = (found[name],) if isinstance(found[name], str | int) else tuple(found[name])
    return found


def _answer(text: str, ids: Sequence[int], log_probs: Sequence[float], reason: str, prompt: int,
            version: int) -> dict[str, Any]:
    pairs = [[value, token, None] for value, token in zip(log_probs, ids, strict=True)]
    return {"text": text, "output_ids": list(ids),
            "meta_info": {"finish_reason": {"type": reason}, "prompt_tokens": prompt, "completion_tokens": len(ids),
                          "cached_tokens": 0, "weight_version": str(version), "output_token_logprobs": pairs}}


async def _elsewhere(url: str, payload: object, action: str, headers: Mapping[str, str] | None,
                     timeout: float = 600.0) -> Any:
    import json
    from urllib.request import Request, urlopen

    from miles_core.hosts import in_daemon_thread

    def ask() -> Any:
        body = None if payload is None or action == "get" else json.dumps(payload).encode()
        request = Request(url, body, {"Content-Type": "application/json", **(headers or {})}, method=action.upper())
        with urlopen(request, timeout=timeout) as answer:
            text = answer.read()
            return json.loads(text) if text.strip() else {}

    return await in_daemon_thread(ask)
