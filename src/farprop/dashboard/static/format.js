// Numbers for people. Everything here returns text; Preact escapes it.

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

/** A number with about three digits. */
export function number(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  if (value < 10) return value < 0.05 ? "<0.1" : value.toFixed(1);
  return whole.format(value);
}

/** How many there are. */
export function count(value) {
  return whole.format(value);
}

/** Calls a second. */
export function perSecond(value) {
  return value === null || value === undefined ? "–" : `${number(value)}/s`;
}

/** A time, given in seconds. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 0) return `-${duration(-seconds)}`;
  if (seconds < 0.001) return `${Math.round(seconds * 1e6)} µs`;
  if (seconds < 1) return `${digits(seconds * 1e3)} ms`;
  if (seconds < 120) return `${digits(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  return `${digits(seconds / 3600)} h`;
}

function digits(value) {
  return value < 10 ? value.toFixed(1) : String(Math.round(value));
}

/** An amount of memory. */
export function bytes(value) {
  if (value === null || value === undefined) return "–";
  let amount = value;
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (amount < 1024 || unit === "GiB") return `${unit === "B" ? Math.round(amount) : digits(amount)} ${unit}`;
    amount /= 1024;
  }
}

/** A function's name without its module. */
export function short(name) {
  return name.slice(name.lastIndexOf(":") + 1);
}

/** A time of day. */
export function clock(seconds) {
  return new Date(seconds * 1000).toLocaleTimeString("en-GB");
}
