"""The program that plays the policy's seat in an environment of verifiers: a chat loop in this process.

- verifiers' own programs start a process for each episode and install what they import. This one needs neither.
- Every model call goes to the endpoint that verifiers gives it, which records it and asks the episode's desk for the
  policy's turn. An answer with an error means that the episode is over: a limit, a stop, or a cut.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

__all__ = ["DeskHarness"]

UNREADABLE = "unreadable_call"
"""The tool whose only argument is the error of a call that could not be read."""


class DeskHarness(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]  # the library is not where types are checked
    """A chat loop with the tools of the task, until a turn calls none."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: Mapping[str, str],
        data: Any,
    ) -> vf.ProgramResult:
        """Play one segment: the task's prompt, or the conversation that the environment continues."""
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        messages += [{"role": "user", "content": prompt}] if isinstance(prompt, str) else _wire(prompt or [])
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        async with AsyncExitStack() as stack:
            session = await stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout()))
            tools, dispatch, connections = await connect_mcp({"mcpServers": servers}, stack)
            while True:
                asked = {"model": ctx.model, "messages": messages} | ({"tools": tools} if tools else {})
                headers = {"Authorization": f"Bearer {secret}"}
                async with session.post(f"{endpoint}/chat/completions", json=asked, headers=headers) as answer:
                    if answer.status >= 400:
                        break
                    said = (await answer.json())["choices"][0]["message"]
                messages.append(said)
                if not said.get("tool_calls"):
                    break
                for each in said["tool_calls"]:
                    messages.append(await _result(each, dispatch, connections))
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


def _wire(messages: Sequence[Any]) -> list[dict[str, Any]]:
    return [message_to_wire(each) for each in messages]


async def _result(call: Mapping[str, Any], dispatch: Mapping[str, Any], connections: Any) -> dict[str, Any]:
    """Return the message with the result of a tool call."""
    name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
    if name == UNREADABLE:
        content = f"error: {arguments['error']}"
    elif name in dispatch:
        content = await call_mcp(connections, dispatch, name, arguments)
    else:
        content = f"error: unknown tool {name!r}; tools: {', '.join(dispatch)}"
    return {"role": "tool", "tool_call_id": call["id"], "name": name, "content": content}
