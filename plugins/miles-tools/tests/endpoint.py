"""The endpoint in front of an engine, and a plain client that speaks HTTP to it."""

import asyncio
import http.client
import json
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path

import numpy as np
from miles_local.engine import LocalEngine
from miles_tools.session import Session
from miles_tools.session_server import SessionServer
from miles_tools.template import Template

from miles_core import rng
from miles_core.stages.rollout import Generation, Response, SamplingParams
from miles_core.types import Prompt

MODEL = Path(__file__).parents[3] / "examples" / "arithmetic" / "tiny-qwen3"
USER = {"role": "user", "content": "3+4="}
TOOLED = (  # a template that shows tools, their calls and their answers, as Qwen's does
    "{%- if tools %}{{- '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}{%- endif %}"
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content }}"
    "{%- for call in message.tool_calls or [] %}{{- '<tool_call>' + call.function.name + ' ' + "
    "(call.function.arguments | tojson) + '</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


@cache
def tokenizer(template=None):
    from transformers import AutoTokenizer

    found = AutoTokenizer.from_pretrained(MODEL, local_files_only=True)
    found.chat_template = template or found.chat_template
    return found


def prompt(uid=3):
    ids = Template(tokenizer(), {}).prompt([USER], "test")
    return Prompt(uid, uid, "", tuple(ids), "7", messages=(USER,))


class Recorded:
    """The real engine, and what it was asked and answered."""

    def __init__(self, engine):
        self.engine, self.requests, self.responses = engine, [], []

    @property
    def version(self):
        return self.engine.version

    async def generate(self, request):
        self.requests.append(request)
        response = await self.engine.generate(request)
        self.responses.append(response)
        return response


class Scripted:
    """Draws these texts, one for each request; waits for `gate` first. No small model calls tools on demand."""

    version = 2

    def __init__(self, *texts, end="<|im_end|>"):
        self.texts, self.end, self.requests = list(texts), end, []
        self.gate, self.asked = asyncio.Event(), asyncio.Event()
        self.gate.set()

    async def generate(self, request):
        self.requests.append(request)
        self.asked.set()
        await self.gate.wait()
        text = self.texts.pop(0)
        if isinstance(text, Exception):
            raise text
        ids = tokenizer()(text + self.end, add_special_tokens=False)["input_ids"]
        count = len(ids)
        return Response(np.array(ids, np.int32), np.full(count, -0.5, np.float32), np.full(count, 2, np.int32),
                        "stop" if self.end else "length", text + self.end)


@asynccontextmanager
async def model():
    engine = LocalEngine(MODEL, tokenizer=tokenizer(), max_context=256)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


def new_session(engine, *, index=0, template=None, context=256, conversations=1, **sampling):
    def decode(ids, skip_special_tokens):
        return tokenizer().decode(list(ids), skip_special_tokens=skip_special_tokens)

    generation = Generation(engine, SamplingParams(**{"max_new_tokens": 128} | sampling), 1,
                            lambda i, turn: rng.key(7, "train", 3, i, turn), decode, timeout=20.0)
    return Session(prompt(), index, generation, context=context,
                   template=lambda tools: Template(tokenizer(template), {}, tools), conversations=conversations)


class Client:
    """Speaks HTTP for one session, in threads, for the server has this one."""

    def __init__(self, server, key):
        self.server, self.key = server, key

    async def __call__(self, body=None, path="/v1/chat/completions", method="POST", **headers):
        return await asyncio.to_thread(self._send, body, path, method, headers)

    def _send(self, body, path, method, headers):
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=20)
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {self.key}"} | {name.replace("_", "-"): v for name, v in headers.items()}
        try:
            connection.request(method, path, data if method == "POST" else None,
                               {name: value for name, value in headers.items() if value is not None})
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read().decode()
        finally:
            connection.close()

    async def ask(self, messages, **more):
        """The JSON of a request that is answered."""
        status, _, text = await self({"model": "m", "messages": messages} | more)
        assert status == 200, text
        return json.loads(text)

    async def leave(self, messages, session, engine):
        """Ask, and go away once the engine is at it, whose gate is to be closed."""
        asked = len(engine.requests)
        body = json.dumps({"messages": messages}).encode()
        head = (f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{self.server.port}\r\n"
                f"Authorization: Bearer {self.key}\r\nContent-Length: {len(body)}\r\n\r\n")
        _, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        writer.write(head.encode() + body)
        async with asyncio.timeout(10):
            while len(engine.requests) == asked:
                await asyncio.sleep(0.01)
            writer.close()
            while session.busy:
                await asyncio.sleep(0.01)

    async def refused(self, body, status, words):
        """The error of a request that is not."""
        found, headers, text = await self(body)
        assert found == status, text
        error = json.loads(text)["error"]
        assert words in error["message"] and error["type"], error
        return headers


@asynccontextmanager
async def serving(session):
    server = SessionServer()
    await server.start()
    key = server.open(session)
    try:
        yield Client(server, key)
    finally:
        if key.partition(".")[0] in server._sessions:
            await server.close(key)
        server.stop()


def conversing(test, engine=None, **options):
    """Run test(client, session, engine) in front of this engine, or of the real one."""
    async def run():
        if engine is not None:
            session = new_session(engine, **options)
            async with serving(session) as client:
                return await test(client, session, engine)
        async with model() as real:
            recorded = Recorded(real)
            session = new_session(recorded, **options)
            async with serving(session) as client:
                return await test(client, session, recorded)

    return asyncio.run(run())


def calls(name="add", arguments='{"a": 1, "b": 2}'):
    return f'I add.<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'
