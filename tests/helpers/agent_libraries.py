# mypy: disable-error-code="import"
"""What agent libraries are asked to do, each by its own Python: `python agent_libraries.py NAME`, the server's address
in OPENAI_BASE_URL. The model answers SAYS, and calls the tool where a user asks for the weather with tools at hand.

Each: a chat, a streamed chat, a tool call whose answer is sent back, structured output. Raises what the library raises.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, Literal

import pydantic

SAYS, CITY = "It is sunny in Rome.", "Rome"


class Weather(pydantic.BaseModel):
    """Of a city."""

    city: Literal["Rome", "Oslo"]
    sunny: bool


def weather(city: str) -> str:
    """Tells the weather of a city."""
    asked.append(city)
    return "sun"


asked: list[str] = []


def called(answer: Any, times: int = 1) -> None:
    assert (answer, asked) == (SAYS, [CITY] * times), (answer, asked)
    asked.clear()


async def openai_agents() -> None:
    from agents import Agent, ModelBehaviorError, Runner, function_tool, set_tracing_disabled

    set_tracing_disabled(True)

    async def answer(**fields: Any) -> Any:
        return (await Runner.run(Agent(name="a", model="demo", **fields), "weather")).final_output

    async def streamed(**fields: Any) -> tuple[str, Any]:
        result = Runner.run_streamed(Agent(name="a", model="demo", **fields), "weather")
        events = [event.data async for event in result.stream_events() if event.type == "raw_response_event"]
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        return "".join(deltas), result.final_output

    assert await answer(instructions="Be short.") == SAYS
    assert await streamed() == (SAYS, SAYS)
    tools = [function_tool(weather)]
    called(await answer(tools=tools))
    called((await streamed(tools=tools))[1])
    assert isinstance(await answer(output_type=Weather), Weather)
    for _ in range(12):  # its tokens are random there: it may begin a call and not know how to go on
        try:
            assert isinstance(await answer(output_type=Weather, tools=tools), Weather)
            break
        except ModelBehaviorError:
            continue
    else:
        raise AssertionError("no answer in the format")
    assert set(asked) == {CITY}  # it may ask again where the format leaves the model no preference


async def pydantic_ai() -> None:
    from pydantic_ai import Agent, NativeOutput, ToolOutput

    async def streamed(agent: Any) -> str:
        async with agent.run_stream("weather") as result:
            return "".join([text async for text in result.stream_text(delta=True)])

    for kind in ("openai:demo", "openai-chat:demo"):
        assert (await Agent(kind, instructions="Be short.").run("hello")).output == SAYS
        assert await streamed(Agent(kind)) == SAYS
        called((await Agent(kind, tools=[weather]).run("weather")).output)
        called(await streamed(Agent(kind, tools=[weather])))
        for form in (NativeOutput, ToolOutput):
            assert isinstance((await Agent(kind, output_type=form(Weather)).run("hello")).output, Weather)


async def instructor() -> None:
    import instructor as library
    from openai import OpenAI

    messages: Any = [{"role": "user", "content": "hello"}]
    modes = library.Mode
    for mode in (modes.TOOLS, modes.JSON_SCHEMA, modes.RESPONSES_TOOLS):
        client = library.from_openai(OpenAI(), mode=mode)
        assert isinstance(client.create(model="demo", messages=messages, response_model=Weather), Weather)
        if mode is not modes.RESPONSES_TOOLS:
            *_, last = client.create_partial(model="demo", messages=messages, response_model=Weather)
            assert Weather.model_validate(last.model_dump())
    client = library.from_openai(OpenAI())
    whole = client.create(model="demo", messages=messages, response_model=None)
    assert whole.choices[0].message.content == SAYS
    chunks = client.create(model="demo", messages=messages, response_model=None, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == SAYS


async def langchain() -> None:
    from langchain_core.messages import HumanMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    for responses in (False, True):
        model = ChatOpenAI(model="demo", use_responses_api=responses)
        assert model.invoke("hello").text == SAYS
        assert "".join(chunk.text for chunk in model.stream("hello")) == SAYS
        bound = model.bind_tools([tool(weather)])
        messages: list[Any] = [HumanMessage("weather")]
        messages.append(bound.invoke(messages))
        messages += [tool(weather).invoke(call) for call in messages[-1].tool_calls]
        called(bound.invoke(messages).text)
        chunks = list(bound.stream("weather"))
        assert sum(chunks[1:], chunks[0]).tool_calls[0]["args"] == {"city": CITY}
        for method in ("json_schema", "function_calling"):
            assert isinstance(model.with_structured_output(Weather, method=method).invoke("hello"), Weather)


async def llm() -> None:
    extra = [{"model_id": name, "model_name": "demo", "api_base": os.environ["OPENAI_BASE_URL"], "supports_tools": True,
              "supports_schema": True, "responses": name == "responses"} for name in ("chat", "responses")]  # fmt: skip
    os.environ["LLM_USER_PATH"] = folder = tempfile.mkdtemp()
    Path(folder, "extra-openai-models.yaml").write_text(json.dumps(extra))
    import llm as library

    for name in ("chat", "responses"):
        model = library.get_model(name)
        assert model.prompt("hello", stream=False).text() == SAYS
        assert "".join(model.prompt("hello")) == SAYS
        for stream in (False, True):
            called(model.chain("weather", tools=[weather], stream=stream).text())
        assert Weather.model_validate_json(model.prompt("hello", schema=Weather).text())


async def ai_python() -> None:
    import ai
    from ai.providers.openai import OpenAIParams

    model = ai.get_model("openai:demo")
    params = ai.models.InferenceRequestParams(provider_params={OpenAIParams: OpenAIParams(store=False)})

    async def said(stream: Any) -> str:
        async with stream as events:
            return "".join([event.chunk async for event in events if isinstance(event, ai.events.TextDelta)])

    async def tell(city: str) -> str:
        """Tells the weather of a city."""
        return weather(city)

    assert await said(ai.stream(model, [ai.user_message("hello")])) == SAYS
    tell.__name__ = "weather"
    called(await said(ai.Agent(tools=[ai.tool(tell)]).run(model, [ai.user_message("weather")], params=params)))
    async with ai.stream(model, [ai.user_message("hello")], output_type=Weather) as stream:
        async for _ in stream:
            pass
    assert isinstance(stream.output, Weather)


if __name__ == "__main__":
    tasks = (openai_agents, pydantic_ai, instructor, langchain, llm, ai_python)
    asyncio.run({task.__name__: task for task in tasks}[sys.argv[1]]())
