// Requests and their streams, one answer as it grows, and the text of an answer as DOM nodes.

export const facts = document.body.dataset;
const KEY = "tgi-key";

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

// An error that the server has answered, or `status` 0: no answer came.
export class ServerError extends Error {
  constructor(status, text, field) {
    super(text);
    this.status = status;
    this.field = field;
  }
}

const errorOf = (status, { error, error_type }) =>
  typeof error === "string"
    ? new ServerError(status, error, error_type)
    : new ServerError(status, error?.message ?? `Status ${status}`, error?.param);

// `secret`: a key that takes the place of the user's.
export async function send(path, { body, signal, secret = key.get() } = {}) {
  const headers = secret ? { authorization: `Bearer ${secret}` } : {};
  const options = { signal, headers, cache: "no-cache", credentials: "omit" };
  if (body !== undefined) {
    headers["content-type"] = "application/json";
    Object.assign(options, { method: "POST", body: JSON.stringify(body) });
  }
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ServerError(0, "The server does not answer.");
  }
  if (response.ok) return response;
  let told = {};
  try {
    told = await response.json();
  } catch {
    // The status says enough.
  }
  throw errorOf(response.status, told);
}

export const ask = async (path, body, signal, secret) => (await send(path, { body, signal, secret })).json();

// Calls `take` with the value of each server-sent event. Throws a ServerError for an event that is an error.
export async function stream(path, body, signal, take, secret) {
  const reader = (await send(path, { body, signal, secret })).body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ; ) {
    let piece;
    try {
      piece = await reader.read();
    } catch (error) {
      if (signal?.aborted) throw error;
      throw new ServerError(0, "The connection to the server broke before the answer was complete.");
    }
    if (piece.done) return;
    const events = (rest + piece.value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.replace(/^event:.*\n/, "").replace(/^data: ?/, "");
      if (data === "[DONE]" || data.startsWith(":")) continue;
      const value = JSON.parse(data);
      if (value.error) throw errorOf(200, value);
      take(value);
    }
  }
}

// What the page shows. Whatever changes it calls `update`.
export const store = {
  mode: facts.hasChat ? "chat" : "prompt",
  state: facts.state,
  load: null,
  turns: { chat: [], prompt: [], compare: [], engine: [] },
  drafts: { chat: "", prompt: "", compare: "" },
  system: "",
  settings: { chat: {}, prompt: {}, compare: {}, engine: {} },
  settingsB: {},
  panel: null, // "settings"
  dialog: null, // "key", or what the dialog with code shows
  isKeyWrong: false,
};
export const watcher = { draw: () => {} };
export const update = (changes = {}) => {
  Object.assign(store, changes);
  watcher.draw();
};

const LINK = /`([^`]+)`|\*\*([^*]+)\*\*|\*([^*\s][^*]*)\*|\[([^\]]+)\]\((https?:\/\/[^\s)]+)\)/g;
const node = (name, ...children) => {
  const made = document.createElement(name);
  made.append(...children);
  return made;
};

// The nodes of one line: code, bold, italic and links. A link shows its target. Everything else is text.
function inline(line) {
  const nodes = [];
  let at = 0;
  for (const match of line.matchAll(LINK)) {
    const [all, code, bold, italic, text, target] = match;
    nodes.push(line.slice(at, match.index));
    at = match.index + all.length;
    if (code) nodes.push(node("code", code));
    else if (bold) nodes.push(node("strong", bold));
    else if (italic) nodes.push(node("em", italic));
    else {
      const link = node("a", text);
      Object.assign(link, { href: target, target: "_blank", rel: "noreferrer noopener" });
      nodes.push(link, ` (${target})`);
    }
  }
  return [...nodes, line.slice(at)];
}

const LONG = 2000; // characters of a line beyond which it is shown as it is while it grows

// Shows a growing text. Complete lines are made once; the last line is made again in each frame. Only text nodes and
// elements of our own get into the page: the text is never read as HTML.
export class TextView {
  constructor() {
    this.root = node("div");
    this.root.className = "text";
    this.start();
  }

  start() {
    this.root.replaceChildren();
    this.line = "";
    this.block = null;
    this.fence = null;
    this.undo = null;
  }

  push(text) {
    const lines = text.split("\n");
    const last = lines.pop();
    if (lines.length || !this.grow(last)) {
      this.undo?.();
      this.undo = null;
      for (const line of lines) {
        this.show(this.line + line, true);
        this.line = "";
      }
      this.line += last;
      if (this.line) this.undo = this.show(this.line, false);
    }
  }

  // Appends to a long line without making it again.
  grow(text) {
    if (this.line.length < LONG || !this.tail) return false;
    this.line += text;
    this.tail.appendData(text);
    return true;
  }

  // Shows a line. Returns what takes it away again.
  show(line, isComplete) {
    const { block, fence } = this;
    const made = this.make(line, isComplete);
    return () => {
      made?.remove();
      Object.assign(this, { block, fence });
    };
  }

  make(line, isComplete) {
    if (this.fence) {
      if (/^\s*```\s*$/.test(line)) return void (this.fence = this.block = null);
      return this.add(this.fence, this.text(isComplete ? line + "\n" : line));
    }
    if (/^\s*```/.test(line)) {
      this.fence = node("code");
      this.block = null;
      return this.add(this.root, node("pre", this.fence));
    }
    if (!line.trim()) return void (this.block = null);
    const item = /^\s*(?:([-*+])|(\d+)[.)])\s+(.*)/.exec(line);
    if (item) {
      const made = node("li", ...inline(item[3]));
      if (item[2]) made.value = Number(item[2]);
      return this.within(item[1] ? "UL" : "OL", made);
    }
    const head = /^#{1,6} (.*)/.exec(line);
    if (head) {
      this.block = null;
      return this.add(this.root, node("p", node("strong", ...inline(head[1]))));
    }
    const nodes = line.length < LONG || isComplete ? inline(line) : [this.text(line)];
    return this.within("P", node("span", ...nodes, isComplete ? "\n" : ""));
  }

  within(name, child) {
    if (this.block?.nodeName === name) return this.add(this.block, child);
    this.block = node(name.toLowerCase(), child);
    return this.add(this.root, this.block);
  }

  add(parent, child) {
    parent.append(child);
    return child;
  }

  text(line) {
    this.tail = document.createTextNode(line);
    return this.tail;
  }
}

// One answer: what the server has sent of it, and its numbers.
export class Answer {
  constructor() {
    this.view = new TextView();
    this.reasoningView = new TextView();
    this.listeners = new Set();
    this.keep([], []);
  }

  // Begins again with tokens that are there already.
  keep(tokens, promptIds) {
    Object.assign(this, { tokens, promptIds, kept: tokens.length, text: "", reasoning: "", calls: [], error: null });
    Object.assign(this, { usage: null, finish: null, first: 0, last: 0, isOpen: true, started: performance.now() });
    for (const token of tokens) this.text += token.added;
    this.view.start();
    this.reasoningView.start();
    this.shown = this.shownReasoning = 0;
  }

  token(token) {
    this.last = performance.now();
    this.first ||= this.last;
    this.tokens.push(token);
  }

  takeChat(event) {
    if (event.prompt_token_ids) this.promptIds = event.prompt_token_ids;
    if (event.usage) this.usage = event.usage;
    const [choice] = event.choices;
    if (!choice) return;
    const { delta, logprobs, token_ids, finish_reason } = choice;
    const reasoning = delta.reasoning_content ?? "";
    this.reasoning += reasoning;
    this.text += delta.content ?? "";
    for (const call of delta.tool_calls ?? []) this.takeCall(call);
    (token_ids ?? []).forEach((id, i) => {
      const told = logprobs?.content?.[i];
      const tops = (told?.top_logprobs ?? []).map((top) => ({ text: top.token, logprob: top.logprob }));
      const added = i ? "" : (delta.content ?? "") + reasoning;
      this.token({ id, text: told?.token ?? "", logprob: told?.logprob ?? null, tops, added });
    });
    this.finish = finish_reason ?? this.finish;
    this.change();
  }

  takeCall({ index, id, function: called }) {
    const call = (this.calls[index] ??= { id: "", name: "", arguments: "" });
    call.id ||= id ?? "";
    call.name += called?.name ?? "";
    call.arguments += called?.arguments ?? "";
  }

  takeCompletion(event) {
    if (event.usage) this.usage = event.usage;
    const [choice] = event.choices;
    if (!choice) return;
    const { text, logprobs, token_ids, finish_reason } = choice;
    this.text += text;
    (token_ids ?? []).forEach((id, i) => {
      const tops = Object.entries(logprobs?.top_logprobs?.[i] ?? {}).map(([text, logprob]) => ({ text, logprob }));
      const logprob = logprobs?.token_logprobs?.[i] ?? null;
      this.token({ id, text: logprobs?.tokens?.[i] ?? text, logprob, tops, added: i ? "" : text });
    });
    this.finish = finish_reason ?? this.finish;
    this.change();
  }

  takeNative({ token, top_tokens, generated_text, details }) {
    const added = token.special ? "" : token.text;
    this.text += added;
    this.token({ id: token.id, text: token.text, logprob: token.logprob, tops: top_tokens ?? [], added });
    if (details) {
      this.finish = details.finish_reason;
      this.seed = details.seed;
      const cached_tokens = details.cached_tokens;
      this.usage = { prompt_tokens: details.input_length, prompt_tokens_details: { cached_tokens } };
    }
    if (generated_text !== null) this.text = generated_text;
    this.change();
  }

  change() {
    this.frame ??= requestAnimationFrame(() => this.show());
  }

  show() {
    this.frame = null;
    if (this.reasoning.length > this.shownReasoning) this.reasoningView.push(this.reasoning.slice(this.shownReasoning));
    this.shownReasoning = this.reasoning.length;
    if (this.text.length < this.shown) {
      // A stop string has cut off the end of the text.
      this.view.start();
      this.shown = 0;
    }
    if (this.text.length > this.shown) this.view.push(this.text.slice(this.shown));
    this.shown = this.text.length;
    for (const listener of this.listeners) listener();
  }

  end(error = null) {
    Object.assign(this, { error, isOpen: false });
    this.show();
  }

  get numbers() {
    const made = this.tokens.length - this.kept;
    const numbers = [];
    if (this.first) numbers.push(["first token", `${Math.round(this.first - this.started)} ms`]);
    if (made > 1 && this.last > this.first)
      numbers.push(["tokens/s", (((made - 1) * 1000) / (this.last - this.first)).toFixed(0)]);
    numbers.push(["tokens", made]);
    if (this.usage) {
      numbers.push(["prompt", this.usage.prompt_tokens]);
      numbers.push(["cached", this.usage.prompt_tokens_details?.cached_tokens ?? 0]);
    }
    if (this.seed != null) numbers.push(["seed", this.seed]);
    if (this.finish && this.finish !== "stop" && this.finish !== "eos_token") numbers.push(["end", this.finish]);
    return numbers;
  }
}
