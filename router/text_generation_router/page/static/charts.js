// Lines over time, drawn by uPlot, which is loaded with the first chart.

import { html, useEffect, useRef } from "./preact.js";

const HEIGHT = 150;
let loading = null;

function load() {
  loading ??= new Promise((done, fail) => {
    const style = Object.assign(document.createElement("link"), { rel: "stylesheet", href: "/ui/uplot.css" });
    const script = Object.assign(document.createElement("script"), { src: "/ui/uplot.js", onload: done, onerror: fail });
    document.head.append(style, script);
  });
  return loading;
}

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const COLOURS = ["--accent", "--second", "--third"];

function options(series, width, unit) {
  const ink = colour("--soft");
  const axis = { stroke: ink, font: "11px system-ui", grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false } };
  return {
    width,
    height: HEIGHT,
    legend: { show: false },
    cursor: { show: false },
    scales: { x: { time: false }, y: { range: (_, low, high) => [Math.min(0, low ?? 0), Math.max(high ?? 0, 1) * 1.05] } },
    axes: [{ ...axis, values: (_, ticks) => ticks.map((tick) => `${tick}${unit}`) }, { ...axis, size: 46 }],
    series: [{}, ...series.map((_, i) => ({ stroke: colour(COLOURS[i]), width: 1.5, points: { show: false } }))],
  };
}

// `series`: [name, values, unit of a value] of each line; `x`: their places, with the unit `unit`.
export default function Chart({ title, x, series, unit = "" }) {
  const place = useRef();
  const plot = useRef(null);
  useEffect(() => {
    let isGone = false;
    const make = async () => {
      await load();
      if (isGone) return;
      plot.current?.destroy();
      plot.current = new window.uPlot(options(series, place.current.clientWidth, unit), [x, ...series.map(([, values]) => values)], place.current);
    };
    make();
    const sizes = new ResizeObserver(([{ contentRect }]) => plot.current?.setSize({ width: contentRect.width, height: HEIGHT }));
    sizes.observe(place.current);
    const scheme = matchMedia("(prefers-color-scheme: dark)");
    scheme.addEventListener("change", make);
    return () => {
      isGone = true;
      sizes.disconnect();
      scheme.removeEventListener("change", make);
      plot.current?.destroy();
      plot.current = null;
    };
  }, []);
  useEffect(() => plot.current?.setData([x, ...series.map(([, values]) => values)]), [x, series]);
  const newest = series.map(([name, values, of = ""], i) => [name, values.at(-1), of, i]);
  return html`<figure class="chart">
    <figcaption>${title}
      ${newest.map(([name, value, of, i]) => html`<span key=${name} class="line${i}"><i></i>${name} ${value == null ? "–" : `${short(value)}${of}`}</span>`)}
    </figcaption>
    <div ref=${place} aria-hidden="true"></div>
  </figure>`;
}

export const short = (value) =>
  Math.abs(value) >= 100 || Number.isInteger(value) ? Math.round(value).toLocaleString("en") : value.toPrecision(2);
