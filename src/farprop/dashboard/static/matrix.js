// Who calls whom: callers are rows, callees are columns.

import { html } from "./vendor/vendor.js";
import { bytes, count, duration, number, perSecond } from "./format.js";

function Cell({ pair, most }) {
  if (!pair) return html`<td class="none">·</td>`;
  const { calls, p50, p99, sent_bytes: sent, received_bytes: received, errors, total } = pair.rate;
  // By the logarithm: a pair that makes a hundredth of the calls is still seen.
  const share = calls > 0 ? Math.log1p(calls) / Math.log1p(most) : 0;
  const lines = [
    `${pair.caller} calls ${pair.callee}: ${perSecond(calls)}, ${count(total)} in all`,
    `p50 ${duration(p50)}, p99 ${duration(p99)}`,
    `${bytes(sent)}/s there, ${bytes(received)}/s back`,
    errors > 0 ? `${perSecond(errors)} failed` : "",
  ];
  const level = Math.round(share * 10);
  return html`<td class="heat${level} ${errors > 0 ? "failing" : ""}" title=${lines.filter(Boolean).join("\n")}>
    ${calls > 0 ? number(calls) : "0"}
  </td>`;
}

export function Matrix({ state }) {
  const pairs = new Map(state.pairs.map((pair) => [`${pair.caller}\n${pair.callee}`, pair]));
  const known = state.workers.map((worker) => worker.name);
  const callers = known.filter((name) => state.pairs.some((pair) => pair.caller === name));
  const callees = known.filter((name) => state.pairs.some((pair) => pair.callee === name));
  const most = Math.max(1, ...state.pairs.map((pair) => pair.rate.calls));
  return html`<section aria-labelledby="matrix-title">
    <h2 id="matrix-title">Who calls whom <small>calls a second</small></h2>
    ${state.pairs.length === 0
      ? html`<p class="empty">No worker has called another since this page was opened.</p>`
      : html`<div class="scroll" tabindex="0" role="group" aria-label="Who calls whom">
          <table class="matrix">
            <thead>
              <tr>
                <th scope="col"><small>caller ↓ callee →</small></th>
                ${callees.map((name) => html`<th scope="col" title=${name}>${name}</th>`)}
              </tr>
            </thead>
            <tbody>
              ${callers.map(
                (caller) => html`<tr>
                  <th scope="row" title=${caller}>${caller}</th>
                  ${callees.map((callee) => html`<${Cell} pair=${pairs.get(`${caller}\n${callee}`)} most=${most} />`)}
                </tr>`,
              )}
            </tbody>
          </table>
        </div>`}
  </section>`;
}
