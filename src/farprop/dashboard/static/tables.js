// What there is in rows: functions, open calls, references, backward passes, errors.

import { html } from "./vendor/vendor.js";
import { colourOf } from "./colours.js";
import { bytes, clock, count, duration, number, perSecond, short } from "./format.js";

/**
 * @param {{title: string, note?: string, empty: string, rows: any[], id: string, keyOf: (row: any) => string,
 *   columns: {head: string, cell: (row: any) => any, title?: (row: any) => string, kind?: string}[],
 *   more?: (row: any) => any}} props  `kind`: classes of the column: num, wide, opt (left out on a phone).
 */
function Section({ title, note, empty, rows, columns, id, keyOf, more }) {
  return html`<section aria-labelledby="${id}-title" id=${id}>
    <h2 id="${id}-title">${title} ${note && html`<small>${note}</small>`}</h2>
    ${rows.length === 0
      ? html`<p class="empty">${empty}</p>`
      : html`<div class="scroll tall" tabindex="0" role="group" aria-label=${title}>
          <table class="rows">
            <thead>
              <tr>${columns.map((column) => html`<th scope="col" class=${column.kind}>${column.head}</th>`)}</tr>
            </thead>
            ${rows.map(
              (row) => html`<tbody key=${keyOf(row)}>
                <tr>
                  ${columns.map((column) => html`<td class=${column.kind} title=${column.title?.(row)}>${column.cell(row)}</td>`)}
                </tr>
                ${more?.(row)}
              </tbody>`,
            )}
          </table>
        </div>`}
  </section>`;
}

function Name({ name, coloured }) {
  return html`<span class="function">
    ${coloured && html`<i class="swatch" style=${{ background: colourOf(name) }}></i>`}${short(name)}
  </span>`;
}

/** Who calls whom, where there is no room for a column. */
function Ends({ row }) {
  return html`<small class="narrow">${row.caller} → ${row.callee}</small>`;
}

export function Functions({ state }) {
  return html`<${Section}
    id="functions"
    title="Functions"
    note="as their workers see them"
    empty="No function has been called since this page was opened."
    rows=${state.functions}
    keyOf=${(row) => row.function}
    columns=${[
      { head: "function", kind: "wide", title: (row) => row.function, cell: (row) => html`<${Name} name=${row.function} coloured />` },
      { head: "calls", kind: "num", cell: (row) => perSecond(row.rate.calls) },
      { head: "p50", kind: "num opt", cell: (row) => duration(row.rate.p50) },
      { head: "p99", kind: "num", cell: (row) => duration(row.rate.p99) },
      { head: "err/s", kind: "num opt", cell: (row) => (row.rate.errors ? html`<span class="bad">${number(row.rate.errors)}</span>` : "0") },
      { head: "in all", kind: "num", cell: (row) => count(row.rate.total) },
    ]}
  />`;
}

function deadline(row) {
  if (row.left === null) return "none";
  return row.left < 0 ? html`<span class="bad">passed</span>` : `in ${duration(row.left)}`;
}

export function Calls({ state }) {
  const columns = [
    { head: "age", kind: "num", cell: (row) => duration(row.seconds) },
    { head: "state", cell: (row) => html`<span class="pill ${row.state}">${row.state}</span>` },
    { head: "function", kind: "wide", title: (row) => row.function, cell: (row) => html`<${Name} name=${row.function} /><${Ends} row=${row} />` },
    { head: "call", kind: "opt", title: (row) => row.id, cell: (row) => `${row.caller} → ${row.callee}` },
    { head: "deadline", kind: "num opt", cell: deadline },
    { head: "at", kind: "opt", cell: (row) => row.place },
    { head: "part of", kind: "opt", cell: (row) => row.part_of },
  ];
  const sentence = (row) => row.why && html`<tr class="why"><td colspan=${columns.length}>${row.why}</td></tr>`;
  return html`<${Section}
    id="calls"
    title="Calls in flight"
    note=${state.more_calls ? `the oldest; ${count(state.more_calls)} more` : "oldest first"}
    empty="No call is in flight."
    rows=${state.calls}
    keyOf=${(row) => row.id}
    columns=${columns}
    more=${sentence}
  />`;
}

function Owners({ owners }) {
  const most = Math.max(1, ...owners.map((row) => row.nbytes));
  return html`<ul class="owners">
    ${owners.map(
      (row) => html`<li key=${row.owner} title="${row.owner} owns ${count(row.values)} values">
        <span class="name">${row.owner}</span>
        <span class="bar"><span style=${{ width: `${((100 * row.nbytes) / most).toFixed(1)}%` }}></span></span>
        <span class="num">${bytes(row.nbytes)}</span>
        <span class="num">${count(row.values)} ${row.values === 1 ? "value" : "values"}</span>
      </li>`,
    )}
  </ul>`;
}

export function References({ state }) {
  return html`<div class="column">
    ${state.owners.length > 0 &&
    html`<section id="owners" aria-labelledby="owners-title">
      <h2 id="owners-title">References <small>by owner</small></h2>
      <${Owners} owners=${state.owners} />
    </section>`}
    <${Section}
      id="references"
      title=${state.owners.length ? "Largest values" : "References"}
      empty="No value is held by a remote reference."
      rows=${state.references}
      keyOf=${(row) => `${row.owner} ${row.id}`}
      columns=${[
        { head: "size", kind: "num", cell: (row) => bytes(row.nbytes) },
        { head: "type", cell: (row) => row.type, title: (row) => `${row.id}, ${row.state}` },
        { head: "owner", cell: (row) => row.owner },
        { head: "held by", kind: "num opt", cell: (row) => count(row.holders), title: () => "how many workers hold it" },
        { head: "made by", kind: "wide", cell: (row) => short(row.made_by), title: (row) => `${row.made_by} ${row.created_at}` },
      ]}
    />
  </div>`;
}

function part(one) {
  if (one.waits_for.length) return `${one.worker} waits for ${one.waits_for.join(", ")}`;
  if (one.missing) return `${one.worker} misses ${one.missing} gradients`;
  return `${one.worker} ${one.runs ? "runs" : "is done"}`;
}

export function Passes({ state }) {
  return html`<${Section}
    id="passes"
    title="Backward passes"
    empty="No backward pass runs."
    rows=${state.passes}
    keyOf=${(row) => `${row.context} ${row.origin} ${row.number}`}
    columns=${[
      { head: "age", kind: "num", cell: (row) => duration(row.seconds) },
      { head: "from", cell: (row) => row.origin, title: (row) => `context ${row.context}, pass ${row.number}, ${row.mode}` },
      { head: "workers", kind: "wide", cell: (row) => row.parts.map(part).join("; ") },
    ]}
  />`;
}

export function Errors({ state }) {
  const columns = [
    { head: "last", kind: "num", cell: (row) => clock(row.time) },
    { head: "error", cell: (row) => html`<span class="bad type">${row.type}</span>${row.count > 1 && ` × ${count(row.count)}`}`, title: (row) => `after ${duration(row.seconds)}` },
    { head: "function", kind: "wide", cell: (row) => html`${short(row.function)}<${Ends} row=${row} />`, title: (row) => row.function },
    { head: "call", kind: "opt", cell: (row) => `${row.caller} → ${row.callee}` },
  ];
  const message = (row) => row.message && html`<tr class="message"><td colspan=${columns.length}>${row.message}</td></tr>`;
  return html`<${Section}
    id="errors"
    title="Errors"
    note=${state.errors.length ? "newest first, those of a kind together" : ""}
    empty="No call has failed since this page was opened."
    rows=${state.errors}
    keyOf=${(row) => `${row.type} ${row.function} ${row.caller} ${row.callee}`}
    columns=${columns}
    more=${message}
  />`;
}
