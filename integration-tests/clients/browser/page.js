// Calls of both client libraries from a page of another origin than the server's. Gives an error text, or "", by name.
import Anthropic from "@anthropic-ai/sdk";
import OpenAI from "openai";

const model = "tgi";
const messages = [{ role: "user", content: "What is 2 + 3?" }];

function expect(holds, what) {
  if (!holds) throw new Error(`not as expected: ${what}`);
}

function checksOf(url) {
  const options = { apiKey: "sk-none", dangerouslyAllowBrowser: true, maxRetries: 0 };
  const openai = new OpenAI({ ...options, baseURL: `${url}/v1` });
  const anthropic = new Anthropic({ ...options, baseURL: url });
  const chat = { model, messages, max_tokens: 8 };
  return {
    "openai: a chat": async () => {
      const answer = await openai.chat.completions.create(chat);
      expect(answer.choices[0].message.content, JSON.stringify(answer));
    },
    "openai: a streamed chat": async () => {
      let text = "";
      for await (const chunk of await openai.chat.completions.create({ ...chat, stream: true }))
        text += chunk.choices[0]?.delta?.content ?? "";
      expect(text, "a text");
    },
    "openai: a response": async () => {
      const answer = await openai.responses.create({ model, input: "What is 2 + 3?", max_output_tokens: 16 });
      expect(answer.output_text, JSON.stringify(answer));
    },
    "openai: models": async () => expect((await openai.models.list()).data.length === 1, "one model"),
    "openai: the answer's own headers are readable": async () => {
      const options = { headers: { "X-Request-Id": "mine", "X-Of-This-Page": "1" } };
      const asked = openai.chat.completions.create({ ...chat, no_such_field: 1 }, options);
      const { response, request_id: id } = await asked.withResponse();
      expect(id === "mine", `the request's id: ${id}`);
      const ignored = response.headers.get("x-ignored-parameters");
      expect(ignored?.startsWith("no_such_field"), `X-Ignored-Parameters: ${ignored}`);
    },
    "openai: an error": async () => {
      const error = await openai.chat.completions.create({ ...chat, max_tokens: -1 }).catch((error) => error);
      expect(error.status === 400 && error.requestID && error.param === "max_tokens", `${error}`);
    },
    "anthropic: a message": async () => {
      const answer = await anthropic.messages.create(chat);
      expect(answer.content[0].text && answer._request_id, JSON.stringify(answer));
    },
    "anthropic: a streamed message": async () => {
      const answer = await anthropic.messages.stream(chat).finalMessage();
      expect(answer.content[0].text && answer.usage.output_tokens > 0, JSON.stringify(answer));
    },
    "anthropic: tokens are counted": async () => {
      const answer = await anthropic.messages.countTokens({ model, messages });
      expect(answer.input_tokens > 0, JSON.stringify(answer));
    },
    "anthropic: an error": async () => {
      const error = await anthropic.messages.create({ ...chat, max_tokens: -1 }).catch((error) => error);
      expect(error.status === 400 && error.requestID, `${error}`);
    },
  };
}

globalThis.outcomesOf = async (url) => {
  const outcomes = {};
  for (const [name, check] of Object.entries(checksOf(url)))
    outcomes[name] = await check().then(
      () => "",
      (error) => `${error}`,
    );
  return outcomes;
};
