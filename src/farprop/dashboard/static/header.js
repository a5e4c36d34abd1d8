// The head of the page: which job, how it is, and its sums.

import { html, useState } from "./vendor/vendor.js";
import { bytes, clock, duration, perSecond } from "./format.js";

function Status({ model }) {
  const { state, connection, note } = model;
  let kind = "live";
  let text = "live";
  if (state.ended) [kind, text] = ["ended", `ended; last seen at ${clock(state.time)}`];
  else if (connection === "gone") [kind, text] = ["bad", "this page's server has gone"];
  else if (connection === "lost") [kind, text] = ["bad", "connection lost; trying again"];
  else if (note) [kind, text] = ["bad", note];
  return html`<span class="status ${kind}" role="status">${text}</span>`;
}

function Figure({ name, value, title, bad }) {
  return html`<div class="figure ${bad ? "bad" : ""}" title=${title}>
    <dt>${name}</dt>
    <dd>${value}</dd>
  </div>`;
}

const KEY = "farprop-theme";

function currentTheme() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
}

const kept = localStorage.getItem(KEY);
if (kept === "dark" || kept === "light") document.documentElement.dataset.theme = kept;

function ThemeButton() {
  const [, redraw] = useState(0);
  const other = currentTheme() === "dark" ? "light" : "dark";
  const change = () => {
    document.documentElement.dataset.theme = other;
    localStorage.setItem(KEY, other);
    document.dispatchEvent(new Event("themechange"));
    redraw((count) => count + 1);
  };
  return html`<button type="button" id="theme" onClick=${change} aria-label="Use the ${other} theme" title="Use the ${other} theme">
    ${other === "dark" ? "Dark" : "Light"}
  </button>`;
}

export function Header({ model, paused, onPause }) {
  const { all, name, id, workers, errors } = model.state;
  const answering = workers.filter((worker) => !worker.silent).length;
  return html`<header>
    <div class="title">
      <h1 title=${id}>${name}</h1>
      <${Status} model=${model} />
    </div>
    <div class="buttons">
      <button type="button" id="pause" aria-pressed=${paused} onClick=${onPause}>${paused ? "Resume" : "Pause"}</button>
      <${ThemeButton} />
    </div>
    <dl class="figures">
      <${Figure} name="workers" value=${answering === workers.length ? answering : `${answering} of ${workers.length}`} title="workers that answer" bad=${answering < workers.length} />
      <${Figure} name="calls" value=${perSecond(all.calls)} title="calls that workers have made, a second" />
      <${Figure} name="p50" value=${duration(all.p50)} title="half of the calls took no longer" />
      <${Figure} name="p99" value=${duration(all.p99)} title="99 of 100 calls took no longer" />
      <${Figure} name="data" value=${`${bytes(all.sent_bytes + all.received_bytes)}/s`} title="requests and answers" />
      <${Figure} name="errors" value=${all.errors ? perSecond(all.errors) : errors.length ? "0/s" : "none"} title="calls that failed, a second" bad=${all.errors > 0} />
    </dl>
  </header>`;
}
