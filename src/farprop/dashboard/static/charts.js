// Charts over time: calls a second of each worker, and how long calls take. Drawn by uPlot.

import { html, uPlot, useEffect, useRef } from "./vendor/vendor.js";
import { colourAt, themeOf } from "./colours.js";
import { duration, perSecond } from "./format.js";

const HEIGHT = 180;
const MOST_LINES = 16;

/** The powers of ten of a logarithmic axis. */
function decades(_, __, least, most) {
  const found = [];
  for (let power = Math.ceil(Math.log10(least) - 1e-9); 10 ** power <= most * 1.0001; power += 1) found.push(10 ** power);
  return found;
}

/** A chart that follows its data, the width of the page and the theme. */
function Chart({ id, title, note, series, data, format, logarithmic, version }) {
  const place = useRef(null);
  const chart = useRef(null);
  const key = JSON.stringify(series.map((one) => one.label));

  useEffect(() => {
    const element = place.current;
    const theme = () => themeOf(element);
    const axis = { stroke: () => theme().text, grid: { stroke: () => theme().line, width: 1 }, ticks: { show: false }, font: "11px system-ui" };
    const value = (_, found) => (found === null || found === undefined ? "–" : format(found));
    chart.current = new uPlot(
      {
        width: element.clientWidth,
        height: HEIGHT,
        cursor: { y: false },
        legend: { live: true },
        scales: { y: logarithmic ? { distr: 3, log: 10 } : { range: (_, __, most) => [0, Math.max(1, most * 1.1)] } },
        axes: [
          { ...axis, space: 70, values: [[60, "{HH}:{mm}", null, null, null, null, null, null, 1], [1, "{HH}:{mm}:{ss}", null, null, null, null, null, null, 1]] },
          { ...axis, size: 64, ...(logarithmic && { splits: decades }), values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : format(tick))) },
        ],
        series: [{ value: (_, time) => (time === null ? "" : new Date(time * 1000).toLocaleTimeString("en-GB")) }, ...series.map((one) => ({ ...one, value, width: 1.5, points: { show: false } }))],
      },
      data,
      element,
    );
    const resize = new ResizeObserver(() => chart.current.setSize({ width: element.clientWidth, height: HEIGHT }));
    const redraw = () => chart.current.redraw(false);
    const preference = matchMedia("(prefers-color-scheme: dark)");
    resize.observe(element);
    document.addEventListener("themechange", redraw);
    preference.addEventListener("change", redraw);
    return () => {
      resize.disconnect();
      document.removeEventListener("themechange", redraw);
      preference.removeEventListener("change", redraw);
      chart.current.destroy();
    };
  }, [key]);

  useEffect(() => {
    const drawn = chart.current;
    drawn.setData(data);
    if (drawn.cursor.left < 0) drawn.setLegend({ idx: data[0].length - 1 }); // the newest, unless somebody points
  }, [version]);

  return html`<section aria-labelledby="${id}-title" id=${id}>
    <h2 id="${id}-title">${title} <small>${note}</small></h2>
    <div class="chart" ref=${place} role="img" aria-label="${title}: the figures are in the tables"></div>
  </section>`;
}

export function Charts({ model, version }) {
  const { samples, state } = model;
  const times = samples.map((sample) => sample.time);
  const workers = state.workers.slice(0, MOST_LINES).map((worker) => worker.name);
  const served = workers.map((name) => samples.map((sample) => sample.workers.get(name)?.served ?? null));
  const dashes = [undefined, [6, 3], [2, 3]];
  const lines = workers.map((label, index) => ({ label, stroke: colourAt(index), dash: dashes[Math.floor(index / 9) % 3] }));
  // A logarithmic scale has no place for nothing.
  const times99 = samples.map((sample) => sample.p99 || null);
  const times50 = samples.map((sample) => sample.p50 || null);
  return html`<div class="pair">
    <${Chart} id="served" title="Calls served" note="a second, by worker" series=${lines} data=${[times, ...served]} format=${perSecond} version=${version} />
    <${Chart}
      id="times"
      title="Time of a call"
      note="all workers"
      series=${[{ label: "p50", stroke: colourAt(0) }, { label: "p99", stroke: colourAt(1), dash: [6, 3] }]}
      data=${[times, times50, times99]}
      format=${duration}
      logarithmic
      version=${version}
    />
  </div>`;
}
