// One request as curl, as our Python client and as OpenAI's. The key is never written: it is a variable.

import { html, useState } from "./preact.js";
import { facts, store } from "./core.js";
import { chatBody, promptBody } from "./app.js";

// A value as Python has it.
function python(value) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
  if (typeof value === "object")
    return `{${Object.entries(value).map(([name, one]) => `${JSON.stringify(name)}: ${python(one)}`).join(", ")}}`;
  return JSON.stringify(value);
}

// In single quotes, as a shell reads them.
const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;
const named = (values) => Object.entries(values).map(([name, value]) => `    ${name}=${python(value)},\n`).join("");

function curl(path, body) {
  const auth = facts.hasKeys ? ` \\\n  -H "Authorization: Bearer $API_KEY"` : "";
  return `curl ${location.origin}${path} -H 'Content-Type: application/json'${auth} \\\n  -d ${quoted(JSON.stringify(body))}`;
}

const OPENAI_NAMES = new Set(["max_tokens", "temperature", "top_p", "seed", "stop", "frequency_penalty", "presence_penalty",
  "logit_bias", "response_format", "tools", "tool_choice", "parallel_tool_calls", "reasoning_effort", "max_completion_tokens"]);
const CLIENT_NAMES = new Set(["max_tokens", "temperature", "top_p", "seed", "stop", "frequency_penalty", "presence_penalty",
  "logit_bias", "repetition_penalty", "tools", "tool_choice", "tool_prompt"]);

function split(settings, names) {
  const known = {};
  const extra = {};
  for (const [name, value] of Object.entries(settings)) (names.has(name) ? known : extra)[name] = value;
  return Object.keys(extra).length ? { ...known, extra_body: extra } : known;
}

function client(call) {
  const headers = facts.hasKeys ? `, headers={"Authorization": f"Bearer {os.environ['API_KEY']}"}` : "";
  const imports = facts.hasKeys ? "import os\n\n" : "";
  return `${imports}from text_generation import Client\n\nclient = Client("${location.origin}"${headers})\n${call}`;
}

function openai(call) {
  const key = facts.hasKeys ? `os.environ["API_KEY"]` : `"none"`;
  const imports = facts.hasKeys ? "import os\n\n" : "";
  return `${imports}from openai import OpenAI\n\nclient = OpenAI(base_url="${location.origin}/v1", api_key=${key})\n${call}`;
}

function ofChat(body, settings) {
  const { messages, model } = body;
  const asked = `    messages=${python(messages)},\n`;
  const ours = named(split(settings, CLIENT_NAMES));
  const theirs = named(split(settings, OPENAI_NAMES));
  return {
    curl: curl("/v1/chat/completions", body),
    "Python client": client(`answer = client.chat(\n${asked}${ours})\nprint(answer.choices[0].message.content)`),
    openai: openai(
      `answer = client.chat.completions.create(\n    model=${python(model)},\n${asked}${theirs})\nprint(answer.choices[0].message.content)`,
    ),
  };
}

function ofPrompt(body, settings) {
  const { inputs, parameters } = body;
  const { stop, ...others } = parameters;
  const ours = named({ ...others, ...(stop ? { stop_sequences: stop } : {}) });
  const { max_new_tokens, grammar, ...sampling } = settings;
  const asked = { model: facts.model, prompt: inputs, ...(max_new_tokens ? { max_tokens: max_new_tokens } : {}) };
  const greedy = "temperature" in settings || settings.do_sample ? {} : { temperature: 0 };
  const extra = grammar ? { extra_body: { grammar } } : {};
  const theirs = split({ ...greedy, ...sampling }, OPENAI_NAMES);
  const merged = { ...theirs, ...(extra.extra_body || theirs.extra_body ? { extra_body: { ...theirs.extra_body, ...extra.extra_body } } : {}) };
  return {
    curl: curl("/generate", body),
    "Python client": client(`answer = client.generate(\n    ${python(inputs)},\n${ours})\nprint(answer.generated_text)`),
    openai: openai(`answer = client.completions.create(\n${named({ ...asked, ...merged })})\nprint(answer.choices[0].text)`),
  };
}

export default function Code({ answer, settings }) {
  const [chosen, setChosen] = useState("curl");
  const [isCopied, setCopied] = useState(false);
  const turns = store.turns[store.mode];
  const place = turns.findIndex((turn) => turn.answer === answer || turn.other === answer);
  const forms = answer.isNative
    ? ofPrompt(promptBody(answer.prompt, settings), settings)
    : ofChat(chatBody(turns.slice(0, place), settings), settings);
  const copy = async () => {
    await navigator.clipboard.writeText(forms[chosen]);
    setCopied(true);
    setTimeout(() => setCopied(false), 1500);
  };
  return html`<section class="code" aria-label="This request as code">
    <div class="actions">
      ${Object.keys(forms).map(
        (name) => html`<button type="button" key=${name} aria-pressed=${name === chosen} onClick=${() => setChosen(name)}>${name}</button>`,
      )}
      <button type="button" onClick=${copy}>${isCopied ? "Copied" : "Copy code"}</button>
    </div>
    <pre tabindex="0"><code>${forms[chosen]}</code></pre>
  </section>`;
}
