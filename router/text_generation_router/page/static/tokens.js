// An answer as its tokens: tinted by probability, the number at the focused one, alternatives at the chosen one.

import { html, useEffect, useRef, useState } from "./preact.js";
import { ask, facts } from "./core.js";
import { continueFrom, promptIdsOf } from "./app.js";

const NUM_ALTERNATIVES = 8;
const percent = (logprob) => {
  const share = 100 * Math.exp(logprob);
  return share >= 99.995 ? "100 %" : share < 0.005 ? "< 0.01 %" : `${share.toPrecision(3)} %`;
};
// From 0, certain, to 5, very unlikely.
const tint = (logprob) => (logprob === null ? 0 : [0.9, 0.6, 0.35, 0.15, 0.05].filter((share) => Math.exp(logprob) < share).length);
const shown = (text) => text.replace(/\n/g, "⏎").replace(/^ +$/, (spaces) => "␣".repeat(spaces.length)) || "∅";

// Where two answers differ first; -1: as far as both go, they do not.
export function firstDifference(a, b) {
  const length = Math.min(a.tokens.length, b.tokens.length);
  for (let i = 0; i < length; i++) if (a.tokens[i].id !== b.tokens[i].id) return i;
  const longer = a.isOpen || b.isOpen || a.tokens.length === b.tokens.length ? -1 : length;
  return longer;
}

// The tokens as elements, of which each frame adds those that are new. A new line in the text is a block of its own, so
// that the browser lays out little for each token.
class TokenList {
  constructor() {
    this.root = document.createElement("div");
    this.root.className = "tokens";
    this.clear();
  }

  clear() {
    this.root.replaceChildren();
    this.spans = [];
    this.line = null;
    this.marked = -1;
  }

  grow(tokens) {
    if (tokens.length < this.spans.length || tokens[this.spans.length - 1] !== this.newest) this.clear();
    for (const token of tokens.slice(this.spans.length)) this.add(token);
    this.newest = tokens.at(-1);
  }

  add(token) {
    if (!this.line) {
      this.line = document.createElement("div");
      this.root.append(this.line);
    }
    const span = document.createElement("span");
    span.className = `token t${tint(token.logprob)}${token.isChosen ? " chosen" : ""}`;
    span.textContent = token.text.replace(/\n+$/, (ends) => "⏎".repeat(ends.length)) || "·";
    span.tabIndex = this.spans.length ? -1 : 0;
    span.setAttribute("role", "button");
    span.dataset.index = this.spans.length;
    this.line.append(span);
    this.spans.push(span);
    if (token.text.endsWith("\n")) this.line = null;
  }

  mark(index) {
    if (index === this.marked) return;
    this.spans[this.marked]?.classList.remove("differs");
    this.spans[index]?.classList.add("differs");
    this.marked = index;
  }
}

// The alternatives of a token with their ids. Those of /generate_stream have them; for other answers the server is asked
// what it would say at the place of the prompt's last token, by token ids.
async function alternativesOf(answer, index) {
  const token = answer.tokens[index];
  const known = token.tops.filter((top) => top.id !== undefined);
  const promptIds = await promptIdsOf(answer);
  if (known.length) return known;
  const prompt = [...promptIds, ...answer.tokens.slice(0, index + 1).map(({ id }) => id)];
  const body = { model: facts.model, prompt, max_tokens: 1, prompt_logprobs: NUM_ALTERNATIVES };
  const rows = (await ask("/v1/completions", body)).choices[0].prompt_logprobs;
  return Object.entries(rows.at(-1))
    .map(([id, { logprob, decoded_token }]) => ({ id: Number(id), text: decoded_token, logprob }))
    .sort((a, b) => b.logprob - a.logprob);
}

function Alternatives({ answer, index, settings, close }) {
  const [found, setFound] = useState(null);
  const [error, setError] = useState("");
  useEffect(() => {
    setFound(null);
    alternativesOf(answer, index).then(setFound, (problem) => setError(problem.message));
  }, [answer, index]);
  if (error) return html`<p class="error" role="alert">${error}</p>`;
  if (!found) return html`<p class="waiting">Asking for the alternatives</p>`;
  const go = (one) => () => {
    close();
    continueFrom(answer, index, one, settings);
  };
  const chosen = answer.tokens[index].id;
  return html`<ol class="alternatives" aria-label="Alternatives">
    ${found.map(
      (one) => html`<li key=${one.id} class=${one.id === chosen ? "is-chosen" : ""}>
        <code>${shown(one.text)}</code>
        <meter min="0" max="1" value=${Math.exp(one.logprob)} aria-label="Probability"></meter>
        <span>${percent(one.logprob)}</span>
        <button type="button" disabled=${answer.isOpen} onClick=${go(one)}>Continue from here</button>
      </li>`,
    )}
  </ol>`;
}

export default function Tokens({ answer, settings, other }) {
  const place = useRef();
  const list = useRef(null);
  const [focus, setFocus] = useState(-1);
  const [chosen, setChosen] = useState(-1);
  list.current ??= new TokenList();
  useEffect(() => {
    place.current.append(list.current.root);
    const draw = () => {
      list.current.grow(answer.tokens);
      if (other) list.current.mark(firstDifference(answer, other));
    };
    draw();
    const watched = [answer, other].filter(Boolean);
    watched.forEach((one) => one.listeners.add(draw));
    return () => watched.forEach((one) => one.listeners.delete(draw));
  }, [answer, other]);
  const indexOf = (event) => Number(event.target.dataset?.index ?? -1);
  const move = (to) => {
    const { spans } = list.current;
    const next = spans[Math.max(0, Math.min(spans.length - 1, to))];
    spans.forEach((span) => (span.tabIndex = span === next ? 0 : -1));
    next.focus();
  };
  const onKeyDown = (event) => {
    const at = indexOf(event);
    if (at < 0) return;
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: Infinity }[event.key];
    if (to !== undefined) move(to);
    else if (event.key === "Enter" || event.key === " ") setChosen(at);
    else return;
    event.preventDefault();
  };
  const onClick = (event) => {
    const at = indexOf(event);
    if (at >= 0) setChosen(at === chosen ? -1 : at);
  };
  const token = answer.tokens[focus];
  return html`<div class="token-view">
    <div ref=${place} onKeyDown=${onKeyDown} onClick=${onClick} onfocusin=${(event) => setFocus(indexOf(event))}
      onMouseOver=${(event) => indexOf(event) >= 0 && setFocus(indexOf(event))}></div>
    <p class="token-facts" role="status">${token
      ? html`<code>${shown(token.text)}</code> ${token.logprob === null ? "" : percent(token.logprob)} · token ${focus + 1} · id ${token.id}`
      : "Choose a token for its probability and alternatives."}</p>
    ${chosen >= 0 && answer.tokens[chosen] &&
    html`<${Alternatives} answer=${answer} index=${chosen} settings=${settings} close=${() => setChosen(-1)} />`}
  </div>`;
}
