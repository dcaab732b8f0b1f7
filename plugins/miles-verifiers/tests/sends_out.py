"""A harness that speaks Anthropic's protocol and sends out another agent, as Claude Code does."""

import verifiers.v1 as vf
from anthropic import AsyncAnthropic
from miles_verifiers.rows import messages_of

__all__ = ["SendsOut"]


class SendsOut(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        messages = messages_of(*self.resolve_prompt(data))
        async with AsyncAnthropic(base_url=endpoint.removesuffix("/v1"), api_key=secret, auth_token=None) as client:
            async def ask(*conversation):
                answer = await client.messages.create(model=ctx.model, max_tokens=16, messages=list(conversation))
                return {"role": "assistant", "content": answer.content[0].text or "."}

            first = await ask(*messages)
            await ask({"role": "user", "content": "1+1="})
            if first["content"] != ".":
                async with client.messages.stream(model=ctx.model, max_tokens=16, messages=[
                        *messages, first, {"role": "user", "content": "sure?"}]) as stream:
                    await stream.get_final_message()
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
