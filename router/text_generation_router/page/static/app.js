// The page: its frame, the conversation, and what is sent. Parts that few visits need are loaded when they are opened.

import { html, render, useEffect, useRef, useState } from "./preact.js";
import { Answer, ask, facts, key, send, store, stream, update, watcher } from "./core.js";

const POLL_MS = 1000;
const STATES = {
  ready: ["Ready", ""],
  lost: ["Shards lost", "The shards are lost and are being started again. Answers wait and go on by themselves."],
  no_engine: ["No engine", "No engine is ready. Requests wait until there is one."],
  draining: ["Shutting down", "The server finishes its answers and takes no new requests."],
  away: ["No answer", "The server does not answer: it is starting, or stopped. This page asks again each second."],
};
const EXAMPLES = ["What is 17 + 25?", "Tell me a story about a fox.", "What is the opposite of cold?"];
const TABS = { chat: "Chat", prompt: "Prompt", compare: "Compare", engine: "Engine" };
const isThere = (tab) => (tab === "engine" ? facts.view : facts.hasChat || tab === "prompt");

// What is sent.

const messageOf = (turn) => {
  if (!turn.answer) return { role: turn.role, content: turn.content, ...turn.extra };
  const message = { role: "assistant", content: turn.answer.text };
  if (turn.answer.calls.length)
    message.tool_calls = turn.answer.calls.map(({ id, name, arguments: text }) => ({
      id,
      type: "function",
      function: { name, arguments: text },
    }));
  return message;
};

export function chatBody(turns, settings) {
  const system = store.system.trim() ? [{ role: "system", content: store.system }] : [];
  return { model: facts.model, messages: [...system, ...turns.map(messageOf)], ...settings };
}

export const promptBody = (prompt, settings) => ({ inputs: prompt, parameters: { do_sample: false, ...settings } });

const tops = () => Math.min(5, Number(facts.maxTopTokens));
const STREAMED = { stream: true, stream_options: { include_usage: true }, return_token_ids: true };

async function run(answer, path, body, take) {
  answer.abort = new AbortController();
  update();
  try {
    await stream(path, body, answer.abort.signal, (event) => answer[take](event));
    answer.end();
  } catch (error) {
    answer.end(answer.abort.signal.aborted ? null : error);
    if (answer.abort.signal.aborted) answer.finish = "stopped";
    if (error.status === 401) update({ dialog: "key", isKeyWrong: Boolean(key.get()) });
  }
  update();
}

export const runChat = (answer, turns, settings) =>
  run(answer, "/v1/chat/completions", { ...chatBody(turns, settings), ...STREAMED, logprobs: true, top_logprobs: 5 }, "takeChat");

function runPrompt(answer, prompt, settings) {
  const body = promptBody(prompt, settings);
  Object.assign(body.parameters, { details: true }, tops() ? { top_n_tokens: tops() } : {});
  return run(answer, "/generate_stream", body, "takeNative");
}

const NATIVE_NAMES = { max_new_tokens: "max_tokens", min_new_tokens: "min_tokens", ignore_eos_token: "ignore_eos" };
const NOT_FOR_COMPLETIONS = new Set(["tools", "tool_choice", "parallel_tool_calls", "tool_prompt", "documents", "truncate",
  "chat_template_kwargs", "reasoning_effort", "separate_reasoning", "include_reasoning", "max_thinking_tokens",
  "add_generation_prompt", "continue_final_message", "max_completion_tokens", "watermark"]);

// Goes on behind the first `index` tokens of an answer and the token `id` with the text `text`, by token ids: exactly
// what the model would have computed.
export async function continueFrom(answer, index, { id, text, logprob }, settings) {
  const kept = answer.tokens.slice(0, index);
  const promptIds = answer.promptIds;
  const prompt = [...promptIds, ...kept.map((token) => token.id), id];
  const tokens = [...kept, { id, text, added: text, logprob, tops: answer.tokens[index]?.tops ?? [], isChosen: true }];
  const named = Object.entries(settings)
    .filter(([name]) => !NOT_FOR_COMPLETIONS.has(name))
    .map(([name, value]) => [NATIVE_NAMES[name] ?? name, value]);
  const greedy = answer.isNative && !("temperature" in settings) && !settings.do_sample ? { temperature: 0 } : {};
  answer.keep(tokens, promptIds);
  answer.isContinued = true;
  answer.change();
  const body = { model: facts.model, prompt, ...greedy, ...Object.fromEntries(named), ...STREAMED, logprobs: 5 };
  if (body.max_tokens) body.max_tokens = Math.max(1, body.max_tokens - tokens.length);
  await run(answer, "/v1/completions", body, "takeCompletion");
}

// The prompt's token ids of an answer of /generate_stream, which does not send them.
export async function promptIdsOf(answer) {
  if (!answer.promptIds.length) answer.promptIds = (await ask("/tokenize", { inputs: answer.prompt })).map(({ id }) => id);
  return answer.promptIds;
}

function newAnswer(fields = {}) {
  return Object.assign(new Answer(), fields);
}

function submit(text) {
  const { mode, turns } = store;
  store.drafts[mode] = mode === "prompt" ? text : "";
  if (mode === "chat") {
    const asked = [...turns.chat.filter((turn) => !turn.answer?.error), { role: "user", content: text }];
    return answerChat(asked);
  }
  if (mode === "prompt") {
    const answer = newAnswer({ prompt: text, isNative: true });
    turns.prompt = [{ answer }];
    return runPrompt(answer, text, store.settings.prompt);
  }
  const asked = [{ role: "user", content: text }];
  const [a, b] = [newAnswer(), newAnswer()];
  turns.compare = [...asked, { answer: a, other: b }];
  return Promise.all([runChat(a, asked, store.settings.compare), runChat(b, asked, store.settingsB)]);
}

function answerChat(asked) {
  const answer = newAnswer();
  store.turns.chat = [...asked, { answer }];
  return runChat(answer, asked, store.settings.chat);
}

function regenerate() {
  const turns = store.turns[store.mode];
  if (store.mode === "prompt") return submit(turns.at(-1).answer.prompt);
  if (store.mode === "compare") return submit(turns[0].content);
  return answerChat(turns.slice(0, -1));
}

const openAnswers = () =>
  store.turns[store.mode].flatMap((turn) => [turn.answer, turn.other]).filter((answer) => answer?.isOpen);
const stop = () => openAnswers().forEach((answer) => answer.abort.abort());

// What is shown.

const Lazy = ({ file, ...props }) => {
  const [part, setPart] = useState(null);
  useEffect(() => {
    import(`/ui/${file}.js`).then((module) => setPart(() => module.default));
  }, []);
  return part && html`<${part} ...${props} />`;
};

const Mount = ({ of }) => {
  const place = useRef();
  useEffect(() => place.current.replaceChildren(of), [of]);
  return html`<div ref=${place}></div>`;
};

const Numbers = ({ answer }) =>
  html`<dl class="numbers" aria-label="Numbers of this answer">
    ${answer.numbers.map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}
  </dl>`;

function Copy({ text }) {
  const [done, setDone] = useState(false);
  const copy = async () => {
    await navigator.clipboard.writeText(text());
    setDone(true);
    setTimeout(() => setDone(false), 1500);
  };
  return html`<button type="button" onClick=${copy}>${done ? "Copied" : "Copy"}</button>`;
}

function Call({ call, isLast }) {
  const [result, setResult] = useState("");
  let shown = call.arguments;
  try {
    shown = JSON.stringify(JSON.parse(call.arguments), null, 2);
  } catch {
    // The arguments are not complete yet.
  }
  const give = (event) => {
    event.preventDefault();
    answerChat([...store.turns.chat, { role: "tool", content: result, extra: { tool_call_id: call.id } }]);
  };
  return html`<section class="call" aria-label="Call of a tool">
    <h3>${call.name}</h3>
    <pre><code>${shown}</code></pre>
    ${isLast &&
    html`<form onSubmit=${give}>
      <input aria-label="Result of ${call.name}" placeholder="Result" value=${result} onInput=${(e) => setResult(e.target.value)} />
      <button>Send the result</button>
    </form>`}
  </section>`;
}

export function AnswerPart({ answer, settings, isLast, otherAnswer }) {
  const [, setCount] = useState(0);
  const [hasTokens, setTokens] = useState(Boolean(otherAnswer));
  const [isCode, setCode] = useState(false);
  useEffect(() => {
    const listener = () => setCount((count) => count + 1);
    answer.listeners.add(listener);
    return () => answer.listeners.delete(listener);
  }, [answer]);
  const { calls, error, isOpen } = answer;
  const isEmpty = isOpen && !answer.tokens.length;
  return html`<article class="answer" aria-busy=${isOpen} aria-label="Answer">
    ${answer.reasoning &&
    html`<details class="reasoning"><summary>Reasoning</summary><${Mount} of=${answer.reasoningView.root} /></details>`}
    ${isEmpty && html`<p class="waiting" role="status">Waiting for the first token</p>`}
    ${hasTokens
      ? html`<${Lazy} file="tokens" answer=${answer} settings=${settings} other=${otherAnswer} />`
      : html`<${Mount} of=${answer.view.root} />`}
    ${calls.map((call, i) => html`<${Call} key=${i} call=${call} isLast=${isLast && !isOpen} />`)}
    ${error && html`<p class="error" role="alert">${error.message}</p>`}
    <${Numbers} answer=${answer} />
    ${!isOpen &&
    html`<div class="actions">
      <button type="button" aria-pressed=${hasTokens} onClick=${() => setTokens(!hasTokens)}>Tokens</button>
      <${Copy} text=${() => answer.text} />
      ${isLast && html`<button type="button" onClick=${regenerate}>Regenerate</button>`}
      <button type="button" aria-pressed=${isCode} onClick=${() => setCode(!isCode)}>Code</button>
    </div>`}
    ${isCode && html`<${Lazy} file="code" answer=${answer} settings=${settings} />`}
  </article>`;
}

function Question({ turn, index }) {
  const [text, setText] = useState(null);
  const resend = (event) => {
    event.preventDefault();
    setText(null);
    stop();
    if (store.mode === "compare") return submit(text);
    answerChat([...store.turns.chat.slice(0, index), { role: turn.role, content: text, extra: turn.extra }]);
  };
  if (text !== null)
    return html`<form class="question editing" onSubmit=${resend}>
      <textarea aria-label="Message" rows="3" value=${text} onInput=${(e) => setText(e.target.value)}
        onKeyDown=${(e) => e.key === "Escape" && setText(null)} ref=${(field) => field?.focus()}></textarea>
      <div class="actions"><button class="primary">Send again</button>
      <button type="button" onClick=${() => setText(null)}>Cancel</button></div>
    </form>`;
  return html`<div class="question">
    <p>${turn.content}</p>
    <button type="button" class="quiet" onClick=${() => setText(turn.content)}>Edit</button>
  </div>`;
}

function Turns() {
  const turns = store.turns[store.mode];
  const settings = store.settings[store.mode];
  if (!turns.length) return html`<${Welcome} />`;
  return turns.map((turn, index) => {
    const isLast = index === turns.length - 1;
    if (turn.other) return html`<${Lazy} file="compare" key=${index} turn=${turn} />`;
    if (turn.answer) return html`<${AnswerPart} key=${index} answer=${turn.answer} settings=${settings} isLast=${isLast} />`;
    return html`<${Question} key=${index} turn=${turn} index=${index} />`;
  });
}

const WELCOME = {
  chat: ["Ask a question", "The model's chat template makes the prompt."],
  prompt: ["Continue a text", "The prompt goes to the model as it is, without a chat template."],
  compare: ["One question, two settings", "Both answers are computed at once. The first token that differs is marked."],
};

function Welcome() {
  const [head, text] = WELCOME[store.mode];
  const examples = store.mode === "prompt" ? ["Once upon a time"] : EXAMPLES;
  return html`<section class="welcome">
    <h2>${head}</h2>
    <p>${text}</p>
    <div class="examples">
      ${examples.map((example) => html`<button type="button" key=${example} onClick=${() => submit(example)}>${example}</button>`)}
    </div>
  </section>`;
}

function System() {
  return html`<details class="system" open=${Boolean(store.system)}>
    <summary>System prompt</summary>
    <textarea aria-label="System prompt" rows="3" value=${store.system} onInput=${(e) => update({ system: e.target.value })}
      placeholder="What the model is told before the conversation"></textarea>
  </details>`;
}

function Composer() {
  const { mode, drafts } = store;
  const isOpen = openAnswers().length > 0;
  const field = useRef();
  useEffect(() => field.current.focus(), [mode]);
  useEffect(() => {
    field.current.style.height = "auto";
    field.current.style.height = `${Math.min(field.current.scrollHeight + 2, 240)}px`;
  }, [drafts[mode], mode]);
  const onSubmit = (event) => {
    event.preventDefault();
    if (isOpen) return stop();
    if (drafts[mode].trim()) submit(drafts[mode]);
  };
  const onKeyDown = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing && !isOpen) onSubmit(event);
  };
  const onInput = (event) => {
    drafts[mode] = event.target.value;
    update();
  };
  return html`<form class="composer" onSubmit=${onSubmit}>
    <textarea ref=${field} aria-label=${mode === "prompt" ? "Prompt" : "Message"} rows="1" value=${drafts[mode]}
      placeholder=${mode === "prompt" ? "A text to continue" : "Message"} onInput=${onInput} onKeyDown=${onKeyDown}></textarea>
    <button class="primary" disabled=${!isOpen && !drafts[mode].trim()}>${isOpen ? "Stop" : "Send"}</button>
  </form>`;
}

function KeyDialog() {
  const place = useRef();
  useEffect(() => {
    place.current.showModal();
    place.current.querySelector("input").focus();
  }, []);
  const onSubmit = (event) => {
    event.preventDefault();
    key.set(new FormData(event.target).get("key").trim());
    update({ dialog: null });
    if (store.turns[store.mode].at(-1)?.answer?.error?.status === 401) regenerate();
  };
  return html`<dialog ref=${place} class="key" onClose=${() => update({ dialog: null })} aria-label="API key">
    <form onSubmit=${onSubmit}>
      <h2>API key</h2>
      ${store.isKeyWrong && html`<p class="error" role="alert">The server does not know this key.</p>`}
      <p>It stays in this tab, and is forgotten when the tab is closed.</p>
      <input name="key" type="password" autocomplete="off" aria-label="API key" />
      <div class="actions"><button class="primary">Use this key</button>
      <button type="button" onClick=${() => update({ dialog: null })}>Cancel</button></div>
    </form>
  </dialog>`;
}

function Header() {
  const { mode, state, load, panel } = store;
  const [word] = STATES[state];
  const count = Object.keys(store.settings[mode]).length;
  const busy = state === "ready" && load?.running != null ? `· ${load.running} running · ${load.waiting} waiting` : "";
  const choose = (chosen) => () => update({ mode: chosen });
  const toggle = () => update({ panel: panel ? null : "settings" });
  return html`<header>
    <h1 title=${facts.model}>${facts.model}</h1>
    <nav aria-label="Modes">
      ${Object.entries(TABS).filter(([name]) => isThere(name)).map(
        ([name, title]) =>
          html`<button type="button" key=${name} aria-current=${name === mode ? "page" : null} onClick=${choose(name)}>${title}</button>`,
      )}
    </nav>
    <p class="state ${state}" role="status"><span class="dot"></span>${word}<span class="busy">${"\u00a0"}${busy}</span></p>
    ${facts.hasKeys && html`<button type="button" onClick=${() => update({ dialog: "key", isKeyWrong: false })}>Key</button>`}
    ${mode !== "engine" && html`<button type="button" aria-expanded=${Boolean(panel)} onClick=${toggle}>Settings${count ? ` · ${count}` : ""}</button>`}
  </header>`;
}

function Footer() {
  const tokens = Number(facts.maxTotalTokens).toLocaleString("en");
  return html`<footer>
    <span>${facts.dtype} on ${facts.device}</span><span>${facts.kernels.split(";")[0]}</span><span>${tokens} tokens</span>
    <span>version ${facts.version}</span><a href="/docs">API</a><a href="/metrics">Metrics</a>
  </footer>`;
}

function Page() {
  const { mode, state, panel, dialog, turns } = store;
  const text = STATES[state][1];
  return html`<${Header} />
    ${text && html`<p class="banner" role="alert">${text}</p>`}
    <div class="room ${panel ? "with-panel" : ""}">
      <main>
        <div class="scroll" onScroll=${noteScroll}><div class="column ${mode}">
          ${(mode === "chat" || mode === "compare") && html`<${System} />`}
          ${mode === "engine" ? html`<${Lazy} file="engine" key="engine" />` : html`<${Turns} key=${mode} />`}
          ${turns[mode].length > 0 && !openAnswers().length &&
          html`<button type="button" class="quiet clear" onClick=${clear}>New conversation</button>`}
        </div></div>
        ${mode !== "engine" && html`<${Composer} />`}
        <${Footer} />
      </main>
      ${panel && mode !== "engine" && html`<${Lazy} file="settings" key=${mode} />`}
    </div>
    ${dialog === "key" && html`<${KeyDialog} />`}`;
}

function clear() {
  store.turns[store.mode] = [];
  update();
}

// The view follows an answer while its end is in sight.
let follows = true;
const noteScroll = ({ target }) => (follows = target.scrollHeight - target.scrollTop - target.clientHeight < 80);
const sizes = new ResizeObserver(() => {
  const scroll = document.querySelector(".scroll");
  if (follows && openAnswers().length) scroll.scrollTop = scroll.scrollHeight;
});

async function poll() {
  const before = JSON.stringify([store.state, store.load]);
  try {
    const { state, ...load } = await (await send("/ui/state", { signal: AbortSignal.timeout(POLL_MS) })).json();
    Object.assign(store, { state, load });
  } catch (error) {
    store.state = error.status === 401 ? "ready" : "away";
  }
  if (JSON.stringify([store.state, store.load]) !== before) update();
  setTimeout(poll, POLL_MS);
}

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !store.dialog) stop();
});
const root = document.body;
root.replaceChildren();
watcher.draw = () => render(html`<${Page} />`, root);
update();
sizes.observe(document.querySelector(".column"));
setTimeout(poll, POLL_MS);
