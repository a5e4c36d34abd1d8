// What is wrong, before everything else: workers that say nothing, and calls that wait for long.

import { html } from "./vendor/vendor.js";

const LONG_SECONDS = 5;
const MOST = 5;

export function Waits({ state }) {
  if (state.ended) return null;
  const silent = state.workers.filter((worker) => worker.silent).map((worker) => [worker.name, `${worker.name} ${worker.silent}`]);
  const long = state.calls.filter((call) => call.why && call.seconds >= LONG_SECONDS).map((call) => [call.id, call.why]);
  const found = [...silent, ...long];
  if (!found.length) return null;
  return html`<section class="waits" aria-label="What waits">
    <ul>
      ${found.slice(0, MOST).map(([key, text]) => html`<li key=${key}>${text}</li>`)}
      ${found.length > MOST && html`<li key="">and ${found.length - MOST} more, below</li>`}
    </ul>
  </section>`;
}
