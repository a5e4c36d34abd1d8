// The task stream: a lane for each thread, a bar for what it did. Drawn by hand, because thousands of bars a second that
// move, can be zoomed and are hit by the pointer are more than chart libraries do well.

import { html, useEffect, useRef, useState } from "./vendor/vendor.js";
import { colourOf, themeOf } from "./colours.js";
import { count, duration, short } from "./format.js";

const LANE = 18;
const GAP = 3;
const HEAD = 16; // a worker's name, above its lanes
const AXIS = 20;
const GUTTER = 64;
const LEAST_SPAN = 0.005;
const MOST_SPAN = 240;
const MOST_LANES = 64;
const FRAME_MS = 33;
const HATCH = 4;
const MARK = 3; // the least width of a failure's mark
const MOST_NAMES = 12;

export class StreamView {
  /** @param {HTMLCanvasElement} canvas */
  constructor(canvas, model, onChange) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.model = model;
    this.onChange = onChange;
    this.span = canvas.clientWidth < 500 ? 8 : 20;
    this.end = null; // null: live
    this.pointers = new Map();
    this.hovered = null;
    this.visible = true;
    this.frozen = null;
    this.drawn = 0;
    this.rows = [];
  }

  get live() {
    return this.end === null;
  }

  rightEdge() {
    if (this.end !== null) return this.end;
    if (this.frozen !== null) return this.frozen;
    return this.model.edge();
  }

  freeze(paused) {
    if (paused === (this.frozen !== null)) return;
    this.frozen = paused ? this.model.edge() : null;
  }

  zoom(factor, at = 1) {
    const edge = this.rightEdge();
    const span = Math.min(MOST_SPAN, Math.max(LEAST_SPAN, this.span * factor));
    if (!this.live || at < 1) this.end = edge - (this.span - span) * (1 - at);
    this.span = span;
    this.changed();
  }

  pan(share) {
    this.end = Math.min(this.rightEdge() + share * this.span, this.model.newest);
    this.changed();
  }

  goLive() {
    this.end = null;
    this.changed();
  }

  changed() {
    this.draw();
    this.onChange();
  }

  /** The lanes by worker and thread, each with its place. A thread without a slice of late has none. */
  layout(from) {
    const order = new Map(this.model.state.workers.map((worker, index) => [worker.name, index]));
    const lanes = [...this.model.lanes.values()].filter((lane) => lane.slices.length && lane.slices[lane.slices.length - 1].end > from - 60);
    lanes.sort((a, b) => (order.get(a.worker) ?? 1e9) - (order.get(b.worker) ?? 1e9) || (b.label === "main") - (a.label === "main") || a.thread - b.thread);
    const rows = [];
    let y = 0;
    let worker = null;
    let index = 0;
    for (const lane of lanes.slice(0, MOST_LANES)) {
      if (lane.worker !== worker) {
        worker = lane.worker;
        index = 0;
        y += HEAD;
      }
      index += 1;
      rows.push({ lane, y, first: index === 1, label: lane.label || `#${index}` });
      y += LANE + GAP;
    }
    return { rows, height: y + AXIS };
  }

  draw() {
    const { canvas, context, model } = this;
    if (!model.state) return;
    const width = canvas.clientWidth;
    const right = this.rightEdge();
    const left = right - this.span;
    const { rows, height } = this.layout(left);
    this.rows = rows;
    const scale = devicePixelRatio || 1;
    if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
      canvas.style.height = `${height}px`;
      canvas.width = Math.round(width * scale);
      canvas.height = Math.round(height * scale);
    }
    const theme = themeOf(canvas);
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, width, height);
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    const area = { left, right, x0: GUTTER, width: width - GUTTER };
    this.#drawAxis(area, height, theme);
    for (const row of rows) {
      context.fillStyle = theme.text;
      if (row.first) {
        context.font = "600 11px system-ui, sans-serif";
        context.fillText(row.lane.worker, 0, row.y - HEAD / 2, width);
        context.font = "11px system-ui, sans-serif";
      }
      context.globalAlpha = 0.75;
      context.fillText(row.label, 8, row.y + LANE / 2, GUTTER - 12);
      context.globalAlpha = 1;
      this.#drawLane(row, area, theme);
    }
    this.drawn = performance.now();
  }

  #drawAxis({ left, right, x0, width }, height, theme) {
    const { context } = this;
    const step = niceStep((right - left) / Math.max(2, width / 110));
    context.lineWidth = 1;
    for (let time = Math.ceil(left / step) * step; time <= right; time += step) {
      const x = Math.round(x0 + ((time - left) / (right - left)) * width) + 0.5;
      context.strokeStyle = theme.line;
      context.beginPath();
      context.moveTo(x, 0);
      context.lineTo(x, height - AXIS);
      context.stroke();
      const label = timeLabel(time, step);
      const half = context.measureText(label).width / 2;
      if (x + half < x0 + width) {
        context.fillStyle = theme.text;
        context.globalAlpha = 0.75;
        context.fillText(label, x - half, height - AXIS / 2);
        context.globalAlpha = 1;
      }
    }
  }

  #drawLane({ lane, y }, { left, right, x0, width }, theme) {
    const { context } = this;
    const perSecond = width / (right - left);
    context.save();
    context.beginPath();
    context.rect(x0, y - 4, width, LANE + 6);
    context.clip();
    for (const slice of lane.slices) {
      if (slice.end < left || slice.start > right) continue;
      const x = x0 + (slice.start - left) * perSecond;
      const w = Math.max(1, (slice.end - slice.start) * perSecond);
      const waits = slice.kind === "wait";
      const colour = colourOf(slice.name);
      const top = waits ? y + LANE - 5 : slice.kind === "span" ? y + 2 : y; // in front of what it is part of
      const h = waits ? 5 : slice.kind === "span" ? LANE - 7 : LANE;
      context.fillStyle = colour;
      // Bars that stand for several are as dense as those are.
      context.globalAlpha = (waits ? 0.55 : 1) * (slice.count > 1 ? 0.45 + 0.55 * Math.min(1, slice.busy / (slice.end - slice.start || 1)) : 1);
      context.fillRect(x, top, w, h);
      context.globalAlpha = 1;
      if (waits && w > 2 * HATCH) hatch(context, x, top, w, h, theme.surface);
      if (slice.failed) {
        context.fillStyle = theme.bad;
        context.fillRect(x, y - 3, Math.max(w, MARK), 3);
      }
      if (slice === this.hovered) {
        context.strokeStyle = theme.text;
        context.lineWidth = 1.5;
        context.strokeRect(x, top, w, h);
      }
      if (!waits && w > 40) {
        context.fillStyle = isLight(colour) ? "#000" : "#fff";
        const shown = Math.max(x, x0) + 5;
        const room = Math.min(x + w, x0 + width) - shown - 3;
        const text = fitting(context, short(slice.name), room);
        if (text) context.fillText(text, shown, y + LANE / 2 + 0.5);
      }
    }
    context.restore();
  }

  /** The slice at a place of the canvas. What lies on top is found first. */
  hit(x, y) {
    const width = this.canvas.clientWidth - GUTTER;
    const right = this.rightEdge();
    const perSecond = width / this.span;
    const time = right - this.span + (x - GUTTER) / perSecond;
    const row = this.rows.find((one) => y >= one.y - 3 && y <= one.y + LANE + 1);
    if (!row || x < GUTTER) return null;
    const near = (MARK + 1) / perSecond; // a mark can be wider than its bar
    const lower = y > row.y + LANE - 6;
    const found = row.lane.slices.filter((one) => one.start - near <= time && one.end + near >= time);
    const slice = found.find((one) => (one.kind === "wait") === lower) ?? found[found.length - 1];
    return slice ? { slice, row } : null;
  }
}

function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= least);
}

function timeLabel(time, step) {
  const text = new Date(time * 1000).toLocaleTimeString("en-GB");
  if (step >= 1) return text;
  const places = Math.min(6, Math.ceil(-Math.log10(step)));
  return `${text.slice(-5)}${(time % 1).toFixed(places).slice(1)}`;
}

function fitting(context, text, room) {
  if (context.measureText(text).width <= room) return text;
  const share = Math.floor((text.length * room) / context.measureText(text).width) - 1;
  return share > 2 ? `${text.slice(0, share)}…` : "";
}

function isLight(colour) {
  const [r, g, b] = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
  return 0.299 * r + 0.587 * g + 0.114 * b > 130;
}

function hatch(context, x, y, w, h, colour) {
  context.save();
  context.beginPath();
  context.rect(x, y, w, h);
  context.clip();
  context.strokeStyle = colour;
  context.lineWidth = 1;
  context.beginPath();
  for (let at = x - (x % HATCH) - h; at < Math.min(x + w, 4096); at += HATCH) {
    context.moveTo(at, y + h);
    context.lineTo(at + h, y);
  }
  context.stroke();
  context.restore();
}

function Tip({ tip }) {
  const { slice, row, x, y, width } = tip;
  const what = { run: "ran for", wait: "waited for", span: "with" }[slice.kind];
  const style = x > width / 2 ? { right: `${width - x + 12}px`, top: `${y + 12}px` } : { left: `${x + 12}px`, top: `${y + 12}px` };
  const many = slice.count > 1 ? `${count(slice.count)} calls, ${duration(slice.busy)} in ${duration(slice.end - slice.start)}` : duration(slice.end - slice.start);
  return html`<div class="tip" style=${style}>
    <strong>${slice.name}</strong>
    <span>${many}${slice.failed > 0 && html`, <span class="bad">${slice.failed} failed</span>`}</span>
    <span>${row.lane.worker}, thread ${row.lane.label || row.lane.thread}${slice.peer && `, ${what} ${slice.peer}`}</span>
  </div>`;
}

function handlers(view, setTip) {
  const place = (event) => {
    const box = view.canvas.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  };
  const show = (event) => {
    const at = place(event);
    const found = view.hit(at.x, at.y);
    view.hovered = found?.slice ?? null;
    view.draw();
    setTip(found ? { ...found, ...at, width: view.canvas.clientWidth } : null);
  };
  return {
    onPointerDown(event) {
      view.pointers.set(event.pointerId, place(event));
      view.canvas.setPointerCapture(event.pointerId);
    },
    onPointerMove(event) {
      const before = view.pointers.get(event.pointerId);
      const at = place(event);
      if (!before) return show(event);
      const others = [...view.pointers.entries()].filter(([id]) => id !== event.pointerId);
      const width = view.canvas.clientWidth - GUTTER;
      if (others.length) {
        const other = others[0][1];
        const factor = Math.abs(before.x - other.x) / Math.max(1, Math.abs(at.x - other.x));
        if (Number.isFinite(factor) && factor > 0) view.zoom(factor, (other.x - GUTTER) / width);
      } else if (at.x !== before.x) {
        view.pan((before.x - at.x) / width);
        setTip(null);
      }
      view.pointers.set(event.pointerId, at);
    },
    onPointerUp(event) {
      view.pointers.delete(event.pointerId);
      show(event);
    },
    onPointerCancel(event) {
      view.pointers.delete(event.pointerId);
    },
    onPointerLeave() {
      view.hovered = null;
      setTip(null);
    },
    onKeyDown(event) {
      const act = {
        "+": () => view.zoom(0.5), "=": () => view.zoom(0.5), "-": () => view.zoom(2),
        ArrowLeft: () => view.pan(-0.25), ArrowRight: () => view.pan(0.25), End: () => view.goLive(), Escape: () => setTip(null),
      }[event.key];
      if (act) {
        event.preventDefault();
        act();
      }
    },
  };
}

function Legend({ functions, spans }) {
  const names = [...functions.map((row) => row.function).slice(0, MOST_NAMES), ...spans];
  return html`<p class="legend">
    ${names.map((name) => html`<span key=${name} title=${name}><i class="swatch" style=${{ background: colourOf(name) }}></i>${short(name)}</span>`)}
  </p>`;
}

export function TaskStream({ model, paused, version }) {
  const canvas = useRef(null);
  const view = useRef(null);
  const [tip, setTip] = useState(null);
  const [, redraw] = useState(0);

  useEffect(() => {
    const made = (view.current = new StreamView(canvas.current, model, () => redraw((count) => count + 1)));
    // Not through Preact: a listener for wheels that prevents scrolling must say so when it is added.
    const wheel = (event) => {
      if (!event.ctrlKey && !event.metaKey && !event.shiftKey) return;
      event.preventDefault();
      const box = canvas.current.getBoundingClientRect();
      if (event.shiftKey) made.pan((event.deltaX || event.deltaY) / 600);
      else made.zoom(1.0015 ** event.deltaY, Math.min(1, Math.max(0, (event.clientX - box.left - GUTTER) / (box.width - GUTTER))));
    };
    canvas.current.addEventListener("wheel", wheel, { passive: false });
    const seen = new IntersectionObserver(([entry]) => (made.visible = entry.isIntersecting));
    seen.observe(canvas.current);
    const resize = new ResizeObserver(() => made.draw());
    resize.observe(canvas.current.parentElement);
    const calm = matchMedia("(prefers-reduced-motion: reduce)");
    let running = true;
    const tick = () => {
      if (!running) return;
      const moves = made.live && made.frozen === null && !calm.matches && model.connection === "live" && !model.state?.ended;
      if (moves && made.visible && performance.now() - made.drawn >= FRAME_MS) made.draw();
      requestAnimationFrame(tick);
    };
    tick();
    redraw((count) => count + 1); // with its handlers: the next event of the job may be late
    return () => {
      running = false;
      seen.disconnect();
      resize.disconnect();
    };
  }, []);

  useEffect(() => {
    view.current.freeze(paused);
    view.current.draw();
  }, [version, paused]);

  const made = view.current;
  const slices = model.slices;
  const on = made ? handlers(made, setTip) : {};
  return html`<section aria-labelledby="stream-title" id="stream" data-slices=${slices} data-lanes=${model.lanes.size}>
    <h2 id="stream-title">
      Task stream <small>a lane for each thread; hatched: it waits</small>
      <span class="buttons">
        <button type="button" onClick=${() => made.zoom(2)} aria-label="Show more time" title="Show more time (-)">−</button>
        <button type="button" onClick=${() => made.zoom(0.5)} aria-label="Show less time" title="Show less time (+)">+</button>
        <button type="button" id="live" aria-pressed=${made?.live ?? true} onClick=${() => made.goLive()} title="Follow the job (End)">Live</button>
      </span>
    </h2>
    ${slices === 0 && html`<p class="empty">No call has ended since this page was opened.</p>`}
    <div class="stream">
      <canvas ref=${canvas} tabindex="0" role="img" ...${on}
        aria-label="Task stream of ${model.lanes.size} threads. Plus and minus zoom, arrows move, End follows the job. The table of functions has the figures."></canvas>
      ${tip && html`<${Tip} tip=${tip} />`}
    </div>
    ${slices > 0 && html`<${Legend} functions=${model.state.functions} spans=${model.spans} />`}
    ${slices > 0 && html`<p class="hint">Drag to move, Ctrl and the wheel to zoom.${model.missing > 0 && ` ${count(model.missing)} events of the last second are not drawn: there were too many.`}</p>`}
  </section>`;
}
