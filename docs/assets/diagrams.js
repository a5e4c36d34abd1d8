// Draws the diagrams of a page in the colours of the theme, and again when the reader changes them.
const diagrams = [...document.querySelectorAll("pre.mermaid")].map((element) => ({ element, text: element.textContent }));

async function draw() {
  const chosen = document.body.dataset.theme;
  const dark = chosen === "dark" || (chosen !== "light" && matchMedia("(prefers-color-scheme: dark)").matches);
  mermaid.initialize({ startOnLoad: false, theme: dark ? "dark" : "neutral", securityLevel: "strict" });
  for (const { element, text } of diagrams) {
    element.removeAttribute("data-processed");
    element.textContent = text;
  }
  await mermaid.run({ nodes: diagrams.map((diagram) => diagram.element) });
  // Wide ones scroll: fitted into the page, their texts could not be read.
  for (const { element } of diagrams) {
    const svg = element.querySelector("svg");
    svg.style.minWidth = `${Math.min(svg.viewBox.baseVal.width, 1100)}px`;
  }
}

let last = Promise.resolve();
const drawInTurn = () => (last = last.then(draw));
addEventListener("DOMContentLoaded", () => {
  drawInTurn();
  new MutationObserver(drawInTurn).observe(document.body, { attributeFilter: ["data-theme"] });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawInTurn);
});
