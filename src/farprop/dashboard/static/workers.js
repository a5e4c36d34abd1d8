// A card for each worker.

import { html } from "./vendor/vendor.js";
import { bytes, count, duration, perSecond } from "./format.js";

const POINTS = 60;

function Spark({ samples, worker }) {
  const values = samples.slice(-POINTS).map((sample) => {
    const one = sample.workers.get(worker);
    return one ? (one.served ?? 0) + (one.made ?? 0) : 0;
  });
  const most = Math.max(1, ...values);
  const offset = POINTS - values.length;
  const points = values.map((value, index) => `${offset + index},${(23 - (22 * value) / most).toFixed(1)}`);
  return html`<svg class="spark" viewBox="0 0 ${POINTS - 1} 24" preserveAspectRatio="none" aria-hidden="true">
    ${points.length > 1 && html`<polygon points="${offset},24 ${points.join(" ")} ${POINTS - 1},24" /><polyline points=${points.join(" ")} />`}
  </svg>`;
}

function Side({ name, title, rate }) {
  return html`<tr title=${title}>
    <th scope="row">${name}</th>
    <td>${rate ? perSecond(rate.calls) : "–"}</td>
    <td>${duration(rate?.p50)}</td>
    <td>${duration(rate?.p99)}</td>
  </tr>`;
}

function Threads({ worker }) {
  const { threads_busy: busy, thread_limit: limit, queued } = worker;
  const share = limit ? Math.min(1, busy / limit) : 0;
  return html`<div class="meter ${share >= 1 ? "full" : ""}" title="${busy} of ${limit} threads run calls; ${queued} calls are queued">
    <span class="bar"><span style=${{ width: `${(100 * share).toFixed(0)}%` }}></span></span>
    <span>${busy}/${limit} threads${queued ? `, ${count(queued)} queued` : ""}</span>
  </div>`;
}

function Card({ worker, samples }) {
  const { served, made } = worker;
  const inward = (served?.received_bytes ?? 0) + (made?.received_bytes ?? 0);
  const outward = (served?.sent_bytes ?? 0) + (made?.sent_bytes ?? 0);
  const errors = (served?.errors ?? 0) + (made?.errors ?? 0);
  const shared = worker.shared_bytes ? `; shared memory ${bytes(worker.shared_bytes)}` : "";
  return html`<article class="card ${worker.silent ? "silent" : ""}" data-worker=${worker.name} aria-label="worker ${worker.name}">
    <h3 title="rank ${worker.rank}, process ${worker.pid} on ${worker.host}">
      <span class="name">${worker.name}</span> <small>rank ${worker.rank}</small>
    </h3>
    ${worker.silent
      ? html`<p class="doing">${worker.silent}</p>`
      : html`<${Spark} samples=${samples} worker=${worker.name} />
          <table class="sides">
            <thead>
              <tr>
                <th scope="col"><span class="hidden">side</span></th>
                <th scope="col">calls</th>
                <th scope="col">p50</th>
                <th scope="col">p99</th>
              </tr>
            </thead>
            <tbody>
              <${Side} name="served" title="calls of others, from their arrival to the answer" rate=${served} />
              <${Side} name="made" title="calls that it has made, from the call to the value" rate=${made} />
            </tbody>
          </table>
          <${Threads} worker=${worker} />
          <p class="facts">
            <span title="bytes that it receives and sends, a second">↓ ${bytes(inward)}/s ↑ ${bytes(outward)}/s</span>
            <span title="memory of the process${shared}">${bytes(worker.memory_bytes)}</span>
          </p>
          ${errors > 0 && html`<p class="facts bad">${perSecond(errors)} of its calls fail</p>`}
          <p class="doing" title=${worker.doing}>${worker.doing}</p>`}
  </article>`;
}

export function Workers({ state, samples }) {
  return html`<section aria-label="Workers">
    <div class="cards">
      ${state.workers.map((worker) => html`<${Card} key=${worker.name} worker=${worker} samples=${samples} />`)}
    </div>
  </section>`;
}
