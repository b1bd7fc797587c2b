// The engine as it works: rows, queue, slots, prefix tree, steps, shards, engines and fronts, requests, history.

import { html, useEffect, useRef, useState } from "./preact.js";
import { ask, facts, stream } from "./core.js";
import Chart, { short } from "./charts.js";

const KEY = "tgi-admin-key";
const adminKey = { get: () => sessionStorage.getItem(KEY) ?? "", set: (value) => sessionStorage.setItem(KEY, value) };
const REASONS = {
  turn: "its turn has not come",
  rule: "running requests go on first: --waiting-served-ratio, --max-waiting-tokens",
  rows: "all rows are taken",
  prefix: "another request computes the same prefix",
  budget: "the prompts of this step are enough: --max-batch-prefill-tokens",
  memory: "the token slots would not last",
  paused: "its client does not read",
};
const STANDINGS = { ready: "ready", lost: "shards lost", draining: "draining", away: "not connected" };
const USES = ["free", "cached", "cached, in use", "held by one request"];
const MAX_STEPS = 512;
const HISTORY_MS = 5000;
const REQUESTS_MS = 2000;
const RETRY_MS = 500;

const ago = (seconds) => (seconds == null ? "" : seconds < 90 ? `${seconds.toFixed(1)} s ago` : `${Math.round(seconds / 60)} min ago`);
const ms = (seconds) => `${short(seconds * 1000)} ms`;
const sleep = (time) => new Promise((done) => setTimeout(done, time));

// Calls `take` with the events of an engine until `signal` is aborted: asks again when a stream ends, or breaks.
async function follow(engine, signal, take) {
  while (!signal.aborted) {
    try {
      await stream(`/engine/state?engine=${encodeURIComponent(engine)}`, undefined, signal, take, adminKey.get());
    } catch (error) {
      if (signal.aborted) return;
      take({ error });
      if (error.status === 401) return;
      await sleep(RETRY_MS);
    }
  }
}

// The value of a route, asked again and again while the page is in sight.
function usePolled(path, everyMs, isOn = true) {
  const [value, setValue] = useState(null);
  useEffect(() => {
    if (!isOn || !path) return undefined;
    const ended = new AbortController();
    (async () => {
      while (!ended.signal.aborted) {
        try {
          if (!document.hidden) setValue(await ask(path, undefined, ended.signal, adminKey.get()));
        } catch (error) {
          if (ended.signal.aborted) return;
          if (error.status === 404) setValue({ gone: true });
        }
        await sleep(everyMs);
      }
    })();
    return () => ended.abort();
  }, [path, isOn]);
  return value;
}

function useEngine(engine, count) {
  const [shown, setShown] = useState({ event: null, state: null, steps: [], error: null });
  useEffect(() => {
    let ended = new AbortController();
    const take = (event) =>
      setShown((before) => {
        if (event.error) return { ...before, error: event.error };
        const isOther = before.event && before.event.engine !== event.engine;
        const steps = isOther ? [] : before.steps;
        return {
          event,
          error: null,
          state: event.state ?? (event.problem || isOther ? null : before.state),
          steps: event.state ? withSteps(steps, event.state.steps) : steps,
        };
      });
    const look = () => {
      ended.abort();
      ended = new AbortController();
      if (!document.hidden) follow(engine, ended.signal, take);
    };
    look();
    document.addEventListener("visibilitychange", look);
    return () => {
      ended.abort();
      document.removeEventListener("visibilitychange", look);
    };
  }, [engine, count]);
  return shown;
}

// States overlap: only steps that are newer are added. New shards begin again with 1.
function withSteps(steps, table) {
  const newest = steps.at(-1)?.number ?? 0;
  const begin = table.number.at(-1) < newest ? 0 : newest;
  const added = table.number
    .map((number, i) => ({ number, ms: table.total_us[i] / 1000, rows: table.rows[i], prompt: table.prompt[i] }))
    .filter(({ number }) => number > begin);
  return added.length ? [...(begin ? steps : []), ...added].slice(-MAX_STEPS) : steps;
}

const Table = ({ name, heads, rows, none }) =>
  rows.length
    ? html`<div class="table" tabindex="0" role="region" aria-label=${name}><table>
        <thead><tr>${heads.map((head) => html`<th key=${head} scope="col">${head}</th>`)}</tr></thead>
        <tbody>${rows.map((cells, i) => html`<tr key=${i}>${cells.map((cell, j) => html`<td key=${j}>${cell}</td>`)}</tr>`)}</tbody>
      </table></div>`
    : html`<p class="none">${none}</p>`;

const Panel = ({ title, note, wide, children }) =>
  html`<section class="panel ${wide ? "wide" : ""}" aria-label=${title}><h2>${title}<small>${note}</small></h2>${children}</section>`;

function Progress({ parts, most }) {
  return html`<span class="progress" aria-hidden="true">
    ${parts.map(([name, count]) => html`<i key=${name} class=${name} style=${{ width: `${(100 * count) / Math.max(most, 1)}%` }}></i>`)}
  </span>`;
}

function Rows({ rows, total }) {
  const lines = rows.id.map((id, i) => {
    const whole = rows.prompt[i] + rows.most[i];
    const computed = Math.min(rows.prefilled[i], rows.prompt[i]) - Math.min(rows.cached[i], rows.prompt[i]);
    const left = Math.max(0, rows.prompt[i] - Math.min(rows.cached[i], rows.prompt[i]) - computed);
    const parts = [["cached", Math.min(rows.cached[i], rows.prompt[i])], ["computed", computed], ["left", left], ["made", rows.made[i]]];
    const prefill = rows.prefilled[i] < rows.prefill_to[i] ? `, ${rows.prefilled[i]} of ${rows.prefill_to[i]} computed` : "";
    return [
      id,
      rows.tenant[i],
      `${rows.age_s[i].toFixed(1)} s`,
      html`<${Progress} parts=${parts} most=${whole} />`,
      `${rows.prompt[i]}, ${rows.cached[i]} cached${prefill}`,
      `${rows.made[i]} of ${rows.most[i]}, about ${rows.expected[i]}`,
      rows.slots[i],
      rows.paused[i] ? "paused: its client does not read" : "",
    ];
  });
  const heads = ["row", "tenant", "age", "progress", "prompt", "new tokens", "slots", "state"];
  return html`<${Panel} title="Rows" wide note=${`${total} running`}>
    <${Table} name="Rows" heads=${heads} rows=${lines} none="No request runs." />
  </${Panel}>`;
}

function Queue({ queue, total }) {
  const lines = queue.id.map((id, i) => [
    id,
    queue.tenant[i],
    `${queue.age_s[i].toFixed(1)} s`,
    queue.made[i] ? `${queue.prompt[i]} and ${queue.made[i]} made` : queue.prompt[i],
    queue.most[i],
    REASONS[queue.reason[i]] ?? queue.reason[i],
  ]);
  return html`<${Panel} title="Queue" wide note=${`${total} waiting${total > queue.id.length ? `, the first ${queue.id.length}` : ""}`}>
    <${Table} name="Queue" heads=${["request", "tenant", "waits", "prompt", "most new", "because"]} rows=${lines} none="No request waits." />
  </${Panel}>`;
}

const WIDE = 128;

function Slots({ slots }) {
  const place = useRef();
  const { runs, capacity, counts, slots_per_cell: per } = slots;
  useEffect(() => {
    const canvas = place.current;
    const cells = runs.reduce((sum, run) => sum + (run >> 2), 0);
    canvas.width = WIDE;
    canvas.height = Math.max(1, Math.ceil(cells / WIDE));
    const context = canvas.getContext("2d");
    const style = getComputedStyle(canvas);
    const colours = USES.map((_, use) => style.getPropertyValue(`--slot${use}`).trim());
    let at = 0;
    for (const run of runs) {
      context.fillStyle = colours[run & 3];
      for (let left = run >> 2; left > 0; ) {
        const wide = Math.min(left, WIDE - (at % WIDE));
        context.fillRect(at % WIDE, Math.floor(at / WIDE), wide, 1);
        at += wide;
        left -= wide;
      }
    }
  });
  const words = USES.map((use, i) => `${counts[i].toLocaleString("en")} ${use}`);
  return html`<${Panel} title="Token slots" note=${`${capacity.toLocaleString("en")} slots${per > 1 ? `, ${per} in a cell` : ""}`}>
    <canvas ref=${place} class="slots" role="img" aria-label=${`Token slots: ${words.join(", ")}`} data-counts=${counts.join(" ")}></canvas>
    <ul class="keys">${words.map((text, i) => html`<li key=${i} class="use${i}"><i></i>${text}</li>`)}</ul>
  </${Panel}>`;
}

const SHOWN_NODES = 60;

function Tree({ tree }) {
  const depths = [];
  tree.parent.forEach((parent, i) => (depths[i] = parent < 0 ? 0 : depths[parent] + 1));
  const most = Math.max(1, ...tree.tokens);
  const order = tree.tokens.map((_, i) => i).filter((i) => i < SHOWN_NODES);
  return html`<${Panel} title="Prefix tree" note=${`${tree.num_nodes} nodes, ${tree.num_tokens.toLocaleString("en")} tokens`}>
    ${tree.tokens.length
      ? html`<ol class="tree" tabindex="0" aria-label="Prefix tree">${order.map(
          (i) => html`<li key=${i} style=${{ paddingLeft: `${Math.min(depths[i], 8)}rem` }}>
            <span class="bar"><i style=${{ width: `${(100 * tree.tokens[i]) / most}%` }}></i></span>
            <span>${tree.tokens[i]} ${tree.tokens[i] === 1 ? "token" : "tokens"} after ${tree.before[i]}</span><span>${tree.locks[i] ? `${tree.locks[i]} in use` : "evictable"}</span>
          </li>`,
        )}</ol>`
      : html`<p class="none">Nothing is cached.</p>`}
  </${Panel}>`;
}

function Steps({ steps }) {
  const numbers = steps.map(({ number }) => number);
  const times = [["time", steps.map((step) => step.ms), " ms"]];
  const sizes = [["rows", steps.map((step) => step.rows), ""], ["prompt tokens", steps.map((step) => step.prompt), ""]];
  return html`<${Panel} title="Steps" note=${steps.length ? `the last ${steps.length}` : ""}>
    <${Chart} title="Time of a step" x=${numbers} series=${times} />
    <${Chart} title="In a step" x=${numbers} series=${sizes} />
  </${Panel}>`;
}

function History({ history }) {
  const { columns, every_s: every } = history;
  const x = columns.running.map((_, i) => Math.round((i + 1 - columns.running.length) * every));
  const hasSteps = columns.steps_per_s.some(Boolean);
  const line = (name, column, unit = "") => [name, columns[column], unit];
  return html`<${Panel} title="The last 15 minutes" wide note=${`${x.length} seconds`}>
    <div class="charts">
      <${Chart} title="Requests" unit=" s" x=${x} series=${[line("running", "running"), line("waiting", "waiting")]} />
      <${Chart} title="Token slots" unit=" s" x=${x} series=${[line("free", "free_slots")]} />
      ${hasSteps && html`<${Chart} title="Tokens a second" unit=" s" x=${x} series=${[line("tokens", "tokens_per_s")]} />`}
      ${hasSteps && html`<${Chart} title="Times" unit=" s" x=${x} series=${[line("step", "step_ms", " ms"), line("between tokens", "token_gap_ms", " ms")]} />`}
      <${Chart} title="Wait of a request that comes now" unit=" s" x=${x} series=${[line("wait", "wait_s", " s")]} />
      <${Chart} title="Tokens to be computed" unit=" s" x=${x} series=${[line("waiting", "waiting_tokens"), line("running", "computing_tokens")]} />
    </div>
  </${Panel}>`;
}

function Shards({ shards }) {
  const told = shards.is_ready ? `ready since ${ago(shards.since_s).replace(" ago", "")}` : `lost ${ago(shards.since_s)}`;
  return html`<${Panel} title="Shards" note=${`epoch ${shards.epoch}`}>
    <dl class="facts ${shards.is_ready ? "" : "is-lost"}">
      <div><dt>State</dt><dd>${told}</dd></div>
      <div><dt>Number</dt><dd>${shards.world_size}</dd></div>
      <div><dt>Kernels</dt><dd>${shards.kernels.split(";")[0]}</dd></div>
      <div><dt>Losses</dt><dd>${shards.num_losses}</dd></div>
      ${shards.loss && html`<div><dt>Last loss</dt><dd>${ago(shards.loss_s)}: ${shards.loss}</dd></div>`}
    </dl>
  </${Panel}>`;
}

function Engines({ event, fronts, choose }) {
  const { engines, front, replicas } = event;
  const replica = new Map((replicas?.replicas ?? []).map((one) => [one.endpoint, one]));
  const lines = engines.map(({ name, standing, running, waiting, loss, loss_s }) => [
    html`<button type="button" class="quiet" aria-pressed=${name === event.engine} onClick=${() => choose(name)}>${name}</button>`,
    html`<span class="standing ${standing}">${STANDINGS[standing]}</span>`,
    running,
    waiting,
    loss ? `${ago(loss_s)}: ${loss}` : replica.get(name)?.reason ?? "",
  ]);
  const absent = (replicas?.replicas ?? []).filter(({ state }) => state !== "ready").map(({ name, state, reason }) => [name, state, "", "", reason]);
  const places = fronts.map(({ id, requests, left_s }) => [
    id === front.id ? `${id}, this page's` : id,
    left_s == null ? "connected" : html`<span class="standing away">left ${ago(left_s)}</span>`,
    requests,
  ]);
  return html`<${Panel} title="Engines and fronts" wide note=${replicas ? `${replicas.wanted} replicas wanted` : ""}>
    <${Table} name="Engines" heads=${["engine", "state", "running", "waiting", "last loss"]} rows=${[...lines, ...absent]} none="No engine is known." />
    ${front.id && html`<${Table} name="Fronts" heads=${["front", "state", "requests here"]} rows=${places} none="The engine tells of no front." />`}
  </${Panel}>`;
}

function Timeline({ generations }) {
  return generations.map(({ stages, state, prompt_tokens, cached_tokens, generated_tokens, ago_s }, i) => {
    const end = Math.max(0.000001, ...stages.map((stage) => stage.end_s));
    return html`<div class="timeline" key=${i}>
      <p>${state === "open" ? `in progress since ${ago_s.toFixed(1)} s` : `${state}: ${prompt_tokens} prompt tokens, ${cached_tokens} cached, ${generated_tokens} made, ${ms(end)}`}</p>
      <ol>${stages.map(
        ({ name, start_s, end_s }, j) => html`<li key=${j}>
          <span>${name}</span>
          <span class="bar"><i class=${name} style=${{ marginLeft: `${(100 * start_s) / end}%`, width: `${(100 * (end_s - start_s)) / end}%` }}></i></span>
          <span>${ms(end_s - start_s)}</span>
        </li>`,
      )}</ol>
    </div>`;
  });
}

function Requests() {
  const listed = usePolled("/engine/requests", REQUESTS_MS);
  const [chosen, setChosen] = useState(null);
  const found = usePolled(chosen && `/engine/requests/${encodeURIComponent(chosen)}`, REQUESTS_MS);
  const lines = (listed?.requests ?? []).map(({ id, state, ago_s, prompt_tokens, generated_tokens = 0 }) => [
    html`<button type="button" class="quiet" aria-pressed=${id === chosen} onClick=${() => setChosen(id === chosen ? null : id)}>${id}</button>`,
    state,
    ago(ago_s),
    prompt_tokens,
    generated_tokens,
  ]);
  return html`<${Panel} title="Requests" note="of this front, the newest first">
    ${chosen && found?.gone && html`<p class="none">It is forgotten.</p>`}
    ${chosen && found?.id === chosen && html`<${Timeline} generations=${found.generations} />`}
    <${Table} name="Requests" heads=${["request", "state", "came", "prompt", "made"]} rows=${lines} none="No request has come." />
  </${Panel}>`;
}

function KeyForm({ isWrong, onKey }) {
  const onSubmit = (event) => {
    event.preventDefault();
    adminKey.set(new FormData(event.target).get("key").trim());
    onKey();
  };
  return html`<form class="admin" onSubmit=${onSubmit}>
    <h2>The administrators' key</h2>
    ${isWrong && html`<p class="error" role="alert">The server does not know this key.</p>`}
    <p>The engine is shown with the key of --admin-api-key. It stays in this tab.</p>
    <input name="key" type="password" autocomplete="off" aria-label="The administrators' key" />
    <div class="actions"><button class="primary">Use this key</button></div>
  </form>`;
}

export default function Engine() {
  const [engine, setEngine] = useState("");
  const [count, setCount] = useState(0);
  const needsKey = facts.view !== "open" && !adminKey.get();
  useEffect(() => {
    if (document.getElementById("engine-style")) return;
    document.head.append(Object.assign(document.createElement("link"), { id: "engine-style", rel: "stylesheet", href: "/ui/engine.css" }));
  }, []);
  return needsKey ? html`<${KeyForm} onKey=${() => setCount(count + 1)} />` : html`<${View} ...${{ engine, setEngine, count, setCount }} />`;
}

function View({ engine, setEngine, count, setCount }) {
  const { event, state, steps, error } = useEngine(engine, count);
  const history = usePolled("/engine/history", HISTORY_MS, !error);
  if (error?.status === 401) return html`<${KeyForm} isWrong=${Boolean(adminKey.get())} onKey=${() => setCount(count + 1)} />`;
  if (!event) return html`<p class="waiting" role="status">${error ? error.message : "Waiting for the engine"}</p>`;
  return html`<div class="engine-view">
    ${error && html`<p class="error" role="alert">${error.message} What is below is what was last known.</p>`}
    ${event.problem && html`<p class="error" role="alert">${event.engine}: ${event.problem}</p>`}
    <${Engines} event=${event} fronts=${state?.fronts ?? []} choose=${setEngine} />
    ${state &&
    html`<${Shards} shards=${state.shards} />
      <${Slots} slots=${state.slots} />
      <${Rows} rows=${state.rows} total=${state.num_running} />
      <${Queue} queue=${state.queue} total=${state.num_waiting} />
      <${Steps} steps=${steps} />
      <${Tree} tree=${state.tree} />`}
    <${Requests} />
    ${history?.columns && html`<${History} history=${history} />`}
  </div>`;
}
