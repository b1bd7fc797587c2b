// The parameters of requests, with the limits and words of the server's own OpenAPI document.

import { html, useEffect, useState } from "./preact.js";
import { ask, facts, store, update } from "./core.js";

// What the page sets itself, and what has no meaning for one stream.
const OWN = new Set(["messages", "model", "stream", "stream_options", "logprobs", "top_logprobs", "return_token_ids", "n",
  "prompt_logprobs", "details", "decoder_input_details", "top_n_tokens", "return_full_text", "best_of"]);
const FIRST = ["max_tokens", "max_new_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop"];
// Fields with the same meaning as the box for a JSON schema.
const FORMS = { chat: "response_format", compare: "response_format", prompt: "grammar" };
const SCHEMAS = { chat: "ChatRequest", compare: "ChatRequest", prompt: "GenerateParameters" };

let documentPromise = null;
const readDocument = () =>
  (documentPromise ??= ask("/openapi.json").catch((error) => {
    documentPromise = null;
    throw error;
  }));

const title = (name) => name[0].toUpperCase() + name.slice(1).replaceAll("_", " ");

// The JSON type of a field, without null, and its limits. A field with several types is given as JSON.
function typeOf(field, name) {
  const kinds = (field.anyOf ?? [field]).filter((kind) => kind.type !== "null");
  const strings = kinds.find((kind) => kind.type === "array" && kind.items?.type === "string");
  if (strings) return { type: "strings" };
  const [kind] = kinds;
  if (kinds.length > 1 || kind.$ref || ["array", "object"].includes(kind.type)) return { type: "json" };
  if (kind.enum) return { type: "choice", values: kind.enum };
  const max = /^max_(new_|completion_)?tokens$/.test(name) ? Number(facts.maxTotalTokens) : kind.maximum;
  return { type: kind.type, min: kind.minimum, max };
}

function parse(type, text) {
  if (text === "") return undefined;
  if (type === "integer" || type === "number") return Number(text);
  if (type === "boolean") return text === "true";
  if (type === "strings") return text.split("\n").filter(Boolean).map((line) => line.replaceAll("\\n", "\n"));
  return type === "json" ? JSON.parse(text) : text;
}

function write(type, value) {
  if (value === undefined) return "";
  if (type === "strings") return [value].flat().map((line) => line.replaceAll("\n", "\\n")).join("\n");
  return type === "json" ? JSON.stringify(value) : String(value);
}

function set(values, name, value) {
  if (value === undefined) delete values[name];
  else values[name] = value;
  update();
}

function Field({ name, field, values }) {
  const kind = typeOf(field, name);
  const [text, setText] = useState(write(kind.type, values[name]));
  const [error, setError] = useState("");
  const change = (typed) => {
    setText(typed);
    try {
      set(values, name, parse(kind.type, typed));
      setError("");
    } catch {
      set(values, name, undefined);
      setError("This is not JSON, and is not sent.");
    }
  };
  const id = `field-${name}`;
  const props = { id, value: text, onInput: (event) => change(event.target.value), "aria-describedby": `${id}-help` };
  let input;
  if (kind.type === "integer" || kind.type === "number")
    input = html`<input ...${props} type="number" step=${kind.type === "integer" ? 1 : "any"} min=${kind.min} max=${kind.max} />`;
  else if (kind.type === "boolean" || kind.type === "choice")
    input = html`<select ...${props}><option value="">default</option>
      ${(kind.values ?? ["true", "false"]).map((value) => html`<option key=${value}>${value}</option>`)}</select>`;
  else if (kind.type === "string") input = html`<input ...${props} />`;
  else input = html`<textarea ...${props} rows="2" placeholder=${kind.type === "json" ? "JSON" : "One on each line"}></textarea>`;
  const dice = () => change(String(crypto.getRandomValues(new Uint32Array(1))[0]));
  return html`<div class="field">
    <label for=${id}>${title(name)}</label>
    <div class="input">${input}
      ${name === "seed" && html`<button type="button" onClick=${dice} aria-label="A random seed">⚄</button>`}</div>
    ${error && html`<p class="error" role="alert">${error}</p>`}
    <p class="help" id="${id}-help">${field.description?.replaceAll("`", "")}</p>
  </div>`;
}

function SchemaBox({ values, mode }) {
  const name = FORMS[mode];
  const known = mode === "prompt" ? values.grammar?.value : values.response_format?.json_schema?.schema;
  const [text, setText] = useState(known ? JSON.stringify(known, null, 2) : "");
  const [error, setError] = useState("");
  const change = (typed) => {
    setText(typed);
    setError("");
    if (!typed.trim()) return set(values, name, undefined);
    try {
      const schema = JSON.parse(typed);
      const form = { type: "json_schema", json_schema: { name: "answer", schema } };
      set(values, name, mode === "prompt" ? { type: "json", value: schema } : form);
    } catch {
      set(values, name, undefined);
      setError("This is not JSON, and is not sent.");
    }
  };
  return html`<div class="field">
    <label for="schema">JSON schema</label>
    <textarea id="schema" rows="4" spellcheck="false" value=${text} onInput=${(event) => change(event.target.value)}
      placeholder='{"type": "object", "properties": {…}}' aria-describedby="schema-help"></textarea>
    ${error && html`<p class="error" role="alert">${error}</p>`}
    <p class="help" id="schema-help">The answer is JSON of this form.</p>
  </div>`;
}

export default function Settings() {
  const { mode } = store;
  const [side, setSide] = useState("A");
  const [fields, setFields] = useState(null);
  const [error, setError] = useState("");
  useEffect(() => {
    readDocument().then(
      (made) => setFields(made.components.schemas[SCHEMAS[mode]].properties),
      (problem) => setError(problem.message),
    );
  }, []);
  const values = side === "B" ? store.settingsB : store.settings[mode];
  const names = Object.keys(fields ?? {}).filter((name) => !OWN.has(name) && name !== FORMS[mode]);
  const first = FIRST.filter((name) => names.includes(name));
  const show = (name) => html`<${Field} key=${name + side} name=${name} field=${fields[name]} values=${values} />`;
  const reset = () => {
    for (const name of Object.keys(values)) delete values[name];
    setSide((before) => before);
    update({ panel: null });
  };
  return html`<aside aria-label="Settings" class="settings">
    <div class="head"><h2>Settings</h2>
      <button type="button" class="quiet" onClick=${reset}>Reset</button>
      <button type="button" class="quiet" onClick=${() => update({ panel: null })}>Close</button></div>
    ${mode === "compare" &&
    html`<div class="sides" role="group" aria-label="Answer">${["A", "B"].map(
      (name) => html`<button type="button" key=${name} aria-pressed=${name === side} onClick=${() => setSide(name)}>${name}</button>`,
    )}</div>`}
    ${error && html`<p class="error" role="alert">${error}</p>`}
    ${!fields && !error && html`<p class="waiting">Reading the server's parameters</p>`}
    ${fields &&
    html`${first.map(show)}
      <${SchemaBox} key=${`schema${side}`} values=${values} mode=${mode} />
      <details><summary>All parameters</summary>${names.filter((name) => !first.includes(name)).map(show)}</details>`}
  </aside>`;
}
