// openai of npm: chat, streams, tools, parsed answers, responses.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import test from "node:test";

import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const baseURL = `${process.env.SIGNS_URL}/v1`;
const png = readFileSync(`${process.env.CHECKOUT}/docs/images/sign.png`);
const url = `data:image/png;base64,${png.toString("base64")}`;
const question = "What colour is the sign?";
const messages = [{ role: "user", content: [{ type: "text", text: question }, { type: "image_url", image_url: { url } }] }];
const Sign = z.object({ colour: z.enum(["red", "green", "blue", "yellow", "orange", "purple", "white", "black"]) });
const look = {
  type: "function",
  function: {
    name: "look",
    parameters: {
      type: "object",
      properties: { side: { enum: ["left", "right"] } },
      required: ["side"],
      additionalProperties: false,
    },
  },
};
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const model = "signpost";

test("chat and streams", async () => {
  const answer = await client.chat.completions.create({ model, messages, temperature: 0 });
  assert.equal(answer.choices[0].message.content, "purple");
  const stream = client.chat.completions.stream({ model, messages, temperature: 0, stream_options: { include_usage: true } });
  assert.equal(await stream.finalContent(), "purple");
  assert.ok((await stream.totalUsage()).completion_tokens > 0);
});

test("parsed answers", async () => {
  const response_format = zodResponseFormat(Sign, "sign");
  const answer = await client.chat.completions.parse({ model, messages, temperature: 0, response_format });
  assert.ok(Sign.parse(answer.choices[0].message.parsed));
  const parsed = await client.responses.parse({ model, input: question, text: { format: zodTextFormat(Sign, "sign") } });
  assert.ok(Sign.parse(parsed.output_parsed));
});

test("tools", async () => {
  const sides = [];
  const called = { ...look, function: { ...look.function, parse: JSON.parse, function: ({ side }) => { sides.push(side); return "A wall."; } } };
  const runner = client.chat.completions.runTools({ model, messages, tools: [called], tool_choice: { type: "function", function: { name: "look" } } });
  await runner.done();
  assert.equal(sides.length, 1);
  const stream = client.chat.completions.stream({ model, messages, tools: [look], tool_choice: "required", parallel_tool_calls: false });
  const final = await stream.finalChatCompletion();
  assert.deepEqual(final.choices[0].message.tool_calls.map((call) => call.function.name), ["look"]);
});

test("responses", async () => {
  const input = [{ role: "user", content: [{ type: "input_text", text: question }, { type: "input_image", image_url: url, detail: "auto" }] }];
  assert.equal((await client.responses.create({ model, input, temperature: 0 })).output_text, "purple");
  const stream = client.responses.stream({ model, input, temperature: 0 });
  assert.equal((await stream.finalResponse()).output_text, "purple");
  const flat = { type: "function", ...look.function, strict: false };
  const called = await client.responses.create({ model, input, tools: [flat], tool_choice: "required", parallel_tool_calls: false });
  assert.equal(called.output[0].name, "look");
});
