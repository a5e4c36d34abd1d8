// Listens to the server, and draws the page anew when something has changed.

import { html, render } from "./vendor/vendor.js";
import { Header } from "./header.js";
import { Model } from "./model.js";
import { perSecond } from "./format.js";
import { Waits } from "./waits.js";
import { Workers } from "./workers.js";
import { TaskStream } from "./task_stream.js";
import { Charts } from "./charts.js";
import { Matrix } from "./matrix.js";
import { Calls, Errors, Functions, Passes, References } from "./tables.js";

const model = new Model();
const root = document.getElementById("page");
let paused = false;
let version = 0;

function Page() {
  const { state } = model;
  if (!state) return html`<p class="first">${model.note || "Waiting for the job …"}</p>`;
  return html`
    <${Header} model=${model} paused=${paused} onPause=${pause} />
    <main>
      <${Waits} state=${state} />
      <${Workers} state=${state} samples=${model.samples} />
      <${TaskStream} model=${model} paused=${paused} version=${version} />
      <${Charts} model=${model} version=${version} />
      <div class="pair">
        <${Matrix} state=${state} />
        <${Functions} state=${state} />
      </div>
      <${Calls} state=${state} />
      <div class="pair">
        <${References} state=${state} />
        <div class="column">
          <${Passes} state=${state} />
          <${Errors} state=${state} />
        </div>
      </div>
    </main>
    <footer>Rates and quantiles are of the last 5 seconds. Nobody is asked while no page is open.</footer>`;
}

function draw() {
  version += 1;
  const { state } = model;
  if (state) {
    document.title = `${state.name} · ${state.ended ? "ended" : perSecond(state.all.calls)} · farprop`;
  }
  root.querySelector(":scope > .first")?.remove(); // what the file had, which is not Preact's
  render(html`<${Page} />`, root);
}

function pause() {
  paused = !paused;
  draw();
}

function listen() {
  const source = new EventSource("events");
  source.onmessage = (event) => {
    model.connection = "live";
    model.add(JSON.parse(event.data));
    if (!paused) draw();
  };
  source.onerror = () => {
    // The browser tries again by itself, unless the server has refused.
    model.connection = source.readyState === EventSource.CLOSED ? "gone" : "lost";
    draw();
  };
}

// The cookie has the token from now on: it need not stay in the address, nor in the history.
history.replaceState(null, "", location.pathname);
draw();
listen();
