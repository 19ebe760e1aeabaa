// What the `ai` SDK for JavaScript is asked to do: see agent_libraries.py. Its default provider uses /v1/responses.
import assert from "node:assert";
import { openai } from "@ai-sdk/openai";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const SAYS = "It is sunny in Rome.";
const asked = [];
const weather = tool({
  description: "Tells the weather of a city.",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => (asked.push(city), "sun"),
});
const unstored = { openai: { store: false } };
for (const [model, providerOptions] of [[openai("demo"), {}], [openai("demo"), unstored], [openai.chat("demo"), {}]]) {
  const common = { model, providerOptions, maxRetries: 0 };
  assert.equal((await generateText({ ...common, prompt: "hello" })).text, SAYS);
  let said = "";
  for await (const text of streamText({ ...common, prompt: "hello" }).textStream) said += text;
  assert.equal(said, SAYS);
  const calling = { ...common, prompt: "weather", tools: { weather }, stopWhen: stepCountIs(3) };
  assert.equal((await generateText(calling)).text, SAYS);
  assert.equal(await streamText(calling).text, SAYS);
  assert.deepEqual(asked.splice(0), ["Rome", "Rome"]);
  const messages = [];
  for (const content of ["weather", "and now", "weather"]) {
    messages.push({ role: "user", content });
    const turn = await generateText({ ...calling, prompt: undefined, messages });
    assert.equal(turn.text, SAYS);
    messages.push(...turn.response.messages);
  }
  assert.equal(asked.splice(0).length, 3);
  const schema = z.object({ city: z.enum(["Rome", "Oslo"]), sunny: z.boolean() });
  const typed = await generateText({ ...common, prompt: "hello", output: Output.object({ schema }) });
  assert.ok(typed.output.city);
}
