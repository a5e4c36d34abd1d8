// What the page knows: the last state of the job, and what is drawn over time. Everything has a limit.

const MOST_SAMPLES = 300;
const MOST_SLICES = 40000;
const MOST_STEP = 5;
const MOST_SPANS = 12;

/**
 * @typedef {{calls: number, errors: number, sent_bytes: number, received_bytes: number, p50: number|null,
 *   p99: number|null, total: number}} Rate
 * @typedef {{name: string, rank: number, host: string, pid: number, doing: string, silent: string, started: number,
 *   threads_busy: number, thread_limit: number, running: number, queued: number, awaited: number, memory_bytes: number,
 *   shared_bytes: number, served: Rate|null, made: Rate|null}} Worker
 * @typedef {{worker: string, thread: number, label: string, slices: Slice[]}} Lane
 * @typedef {{name: string, kind: string, start: number, end: number, busy: number, count: number, failed: number,
 *   peer: string}} Slice  Times are seconds by the time of day.
 */

export class Model {
  constructor() {
    this.forget();
    this.note = "";
    /** connecting, live, lost or gone */
    this.connection = "connecting";
  }

  forget() {
    this.state = null;
    /** @type {{time: number, calls: number, p50: number|null, p99: number|null, workers: Map<string, number|null>}[]} */
    this.samples = [];
    /** @type {Map<string, Lane>} */
    this.lanes = new Map();
    /** Names of bars that are no functions: backward passes, collectives. */
    this.spans = new Set();
    this.slices = 0;
    this.missing = 0;
    this.newest = 0;
    this.arrived = 0;
    this.step = 1.1;
  }

  /** Take in a message of the server. */
  add(message) {
    if (this.state && message.state && message.state.id !== this.state.id) this.forget();
    if (message.state) this.state = message.state;
    this.note = message.note;
    for (const part of message.parts) this.#addPart(part);
    this.#trim();
  }

  #addPart(part) {
    if (part.time <= this.newest) return;
    const workers = new Map(part.workers.map((one) => [one.worker, one]));
    this.samples.push({ time: part.time, calls: part.calls, p50: part.p50, p99: part.p99, workers });
    const { names, lanes, slices, missing } = part.stream;
    this.missing = missing;
    for (const [lane, name, kind, start, length, busy, count, failed, peer] of slices) {
      const [worker, thread, label] = lanes[lane];
      if (kind === "span" && this.spans.size < MOST_SPANS) this.spans.add(names[name]);
      const begin = part.time + start / 1e6;
      this.#lane(worker, thread, label).slices.push({
        name: names[name], kind, start: begin, end: begin + length / 1e6, busy: busy / 1e6, count, failed, peer,
      });
    }
    this.slices += slices.length;
    if (this.newest) this.step = Math.min(MOST_STEP, Math.max(1, part.time - this.newest)) * 1.1;
    this.newest = part.time;
    this.arrived = performance.now();
  }

  #lane(worker, thread, label) {
    const key = `${worker}\n${thread}`;
    let lane = this.lanes.get(key);
    if (!lane) this.lanes.set(key, (lane = { worker, thread, label, slices: [] }));
    return lane;
  }

  #trim() {
    if (this.samples.length > MOST_SAMPLES) this.samples.splice(0, this.samples.length - MOST_SAMPLES);
    if (this.slices <= MOST_SLICES) return;
    // Drop the older half of what there is, so that this is rare.
    const starts = [...this.lanes.values()].flatMap((lane) => lane.slices.map((one) => one.start)).sort((a, b) => a - b);
    const cut = starts[starts.length >> 1];
    this.slices = 0;
    for (const [key, lane] of this.lanes) {
      lane.slices = lane.slices.filter((one) => one.start >= cut);
      this.slices += lane.slices.length;
      if (!lane.slices.length) this.lanes.delete(key);
    }
  }

  /**
   * The newest time to draw. It moves evenly, although parts come in steps: so it is one step behind.
   */
  edge() {
    const now = this.newest + (performance.now() - this.arrived) / 1000;
    return Math.min(now - this.step, this.newest);
  }
}
