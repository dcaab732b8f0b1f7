"""Episodes against an endpoint of OpenAI's protocol that says what the test wants it to."""

import asyncio
import contextlib
import itertools
import socket
from pathlib import Path

import pytest
from aiohttp import web
from miles_tools.agent_call import AgentFailed
from miles_verifiers.environments import Environments

pytestmark = pytest.mark.filterwarnings("ignore:The 'initial' parameter")  # of tenacity, by verifiers itself
WRONG = Path(__file__).with_name("misbehaving.py")


@contextlib.asynccontextmanager
async def endpoint(*answers):
    """(its address, the messages of each request) of a policy that answers in this order, the last again and again."""
    asked, said = [], itertools.chain(answers, itertools.repeat(answers[-1]))

    async def complete(request):
        asked.append((await request.json())["messages"])
        answer = next(said)
        if isinstance(answer, int):
            return web.json_response({"error": {"code": "context_length_exceeded", "message": "full"}}, status=answer)
        message = {"role": "assistant", **(answer if isinstance(answer, dict) else {"content": answer})}
        return web.json_response({"id": "1", "object": "chat.completion", "created": 1, "model": "miles", "choices": [
            {"index": 0, "finish_reason": "stop", "message": message}]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", complete)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1", asked
    finally:
        await runner.cleanup()


def played(table, *answers, times=1, **role):
    """(what `play` says of each episode of the first task, the requests of all)."""
    async def play():
        environments = Environments({"words": {"taskset": {"id": "words_env"} | table, **role}})
        task = next(iter(environments.load("words").taskset))
        try:
            async with endpoint(*answers) as (address, asked):
                return await asyncio.gather(*(environments.play("words", task, address) for _ in range(times)),
                                            return_exceptions=True), asked
        finally:
            environments.close()

    return asyncio.run(play())


def test_an_episode_has_the_reward_and_the_figures_of_its_environment():
    (figures,), asked = played({}, "It has 5.")
    assert figures == {"reward": 1.0, "right": 1.0, "characters": 9.0}
    assert asked == [[{"role": "user", "content": "How many letters has apple?"}]]


def test_rewards_are_weighted_and_each_is_told_by_its_name():
    (figures,), _ = played({"task": {"rewards": {"right": {"weight": 0.5}, "also": {
        "fn": f"{WRONG}:blocking", "weight": 2.0}}}}, "It has 5.")
    assert figures == {"reward": 2.5, "right": 1.0, "also": 1.0, "characters": 9.0}


def test_a_scorer_that_fails_is_no_reward():
    (failure,), _ = played({"task": {"rewards": {"broken": {"fn": f"{WRONG}:broken"}}}}, "It has 5.")
    assert isinstance(failure, AgentFailed) and failure.reason == "verifiers_failed"
    assert "ZeroDivisionError" in failure.detail


def test_a_policy_without_room_left_ends_the_conversation_and_is_scored():
    (figures,), asked = played({}, call("{}"), 400)
    assert figures["reward"] == 0.0 and len(asked) == 2


def test_an_episode_that_ends_at_its_turns_is_truncated():
    (figures,), asked = played({}, call("{}"), agent={"max_turns": 2})
    assert figures == {"reward": 0.0, "right": 0.0, "characters": 0.0, "truncated": 1.0} and len(asked) == 2


def test_a_policy_that_fails_is_no_reward():
    (failure,), _ = played({}, 418)
    assert isinstance(failure, AgentFailed)


def test_a_scorer_that_blocks_does_not_block_the_run():
    async def turns():
        """How often this loop had its turn while a scorer slept for half a second."""
        environments, count = Environments({"words": {"taskset": {"id": "words_env", "task": {
            "rewards": {"slow": {"fn": f"{WRONG}:blocking"}}}}}}), 0
        task = next(iter(environments.load("words").taskset))
        async with endpoint("5") as (address, asked):
            episode = asyncio.ensure_future(environments.play("words", task, address))
            while not episode.done():
                await asyncio.sleep(0.001)
                count += bool(asked)
            environments.close()
        return count, await episode

    count, figures = asyncio.run(turns())
    assert figures["slow"] == 1.0 and count > 5


def call(arguments, name="dictionary_letters"):
    """An answer that calls a tool."""
    return {"content": "", "tool_calls": [
        {"id": "a", "type": "function", "function": {"name": name, "arguments": arguments}}]}


@contextlib.asynccontextmanager
async def dictionary():
    """The address of a tool server of MCP."""
    import uvicorn
    from mcp.server.mcpserver import MCPServer

    async def letters(word: str) -> str:
        return str(len(word))

    tools = MCPServer("dictionary")
    tools.add_tool(letters, name="letters")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(tools.streamable_http_app(), log_level="error"))
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/mcp"
        finally:
            server.should_exit = True
            await serving


def test_tools_are_called_and_wrong_calls_are_answered():
    import verifiers.v1 as vf
    from miles_verifiers.harness import InProcess

    async def told():
        harness = InProcess(vf.HarnessConfig(id="miles-verifiers"))
        answers = (call('{"word": "apple"}'), call("{"), call("[]"), call("{}", "other"), "5")
        async with endpoint(*answers) as (address, asked), dictionary() as tools:
            context = vf.ModelContext(model="miles", client=vf.EvalClientConfig(base_url=address))
            await harness.launch(context, None, None, address, "key", {"dictionary": tools}, vf.TaskData(prompt="?"))
        return [messages[-1]["content"] for messages in asked[1:]]

    right, *wrong = asyncio.run(told())
    assert right == "5" and len(wrong) == 3 and all(answer.startswith("error") for answer in wrong)


@pytest.mark.slow
def test_tools_of_a_task_are_served_by_processes():
    (figures,), asked = played({"task": {"dictionary": {}}}, call('{"word": "apple"}'), "5")
    assert figures["reward"] == 1.0 and asked[1][-1]["content"] == "5"
