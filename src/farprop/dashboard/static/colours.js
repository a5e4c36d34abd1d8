// Colours for functions and workers, which people with any kind of colour vision can tell apart.

const palette = ["#3b7db8", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#8c6d46", "#7a6fc6", "#a3a829", "#7d8a97"];
const given = new Map();

/** The colour of a function: the next one that is free, and from then on the same. */
export function colourOf(name) {
  if (!given.has(name)) given.set(name, palette[given.size % palette.length]);
  return given.get(name);
}

export function colourAt(index) {
  return palette[index % palette.length];
}

/** What of the theme a canvas needs: its own style has it, because custom properties are not resolved. */
export function themeOf(element) {
  const style = getComputedStyle(element);
  return { text: style.color, line: style.borderTopColor, surface: style.backgroundColor, bad: style.outlineColor };
}
