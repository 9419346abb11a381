// The AI SDK with its provider for OpenAI, whose default is /v1/responses, and the one for compatible servers.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import test from "node:test";

import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, Output, streamText, tool } from "ai";
import { z } from "zod";

const baseURL = `${process.env.SIGNS_URL}/v1`;
const png = readFileSync(`${process.env.CHECKOUT}/docs/images/sign.png`);
const Sign = z.object({ colour: z.enum(["red", "green", "blue", "yellow", "orange", "purple", "white", "black"]) });
const prompt = [{ role: "user", content: [{ type: "text", text: "What colour is the sign?" }, { type: "image", image: png }] }];
const tools = { look: tool({ description: "Look at a side.", inputSchema: z.object({ side: z.enum(["left", "right"]) }) }) };
const providers = {
  "@ai-sdk/openai": createOpenAI({ baseURL, apiKey: "none" })("signpost"),
  "@ai-sdk/openai-compatible": createOpenAICompatible({ baseURL, name: "triptych", includeUsage: true, supportsStructuredOutputs: true })("signpost"),
};
for (const [name, model] of Object.entries(providers)) {
  test(`${name}: text and streams`, async () => {
    const { text, usage } = await generateText({ model, messages: prompt, temperature: 0 });
    assert.equal(text, "purple");
    assert.ok(usage.outputTokens > 0);
    const stream = streamText({ model, messages: prompt, temperature: 0 });
    assert.equal(await stream.text, "purple");
    assert.ok((await stream.usage).outputTokens > 0);
  });

  test(`${name}: tools`, async () => {
    const { toolCalls } = await generateText({ model, messages: prompt, tools, toolChoice: "required" });
    assert.ok(toolCalls.length >= 1 && toolCalls.every((call) => call.toolName === "look" && !call.invalid));
    const named = streamText({ model, messages: prompt, tools, toolChoice: { type: "tool", toolName: "look" } });
    assert.equal((await named.toolCalls)[0].toolName, "look");
  });

  test(`${name}: objects`, async () => {
    const { object } = await generateObject({ model, messages: prompt, schema: Sign });
    assert.ok(Sign.parse(object));
    const { output } = await generateText({ model, messages: prompt, output: Output.object({ schema: Sign }) });
    assert.ok(Sign.parse(output));
  });
}
