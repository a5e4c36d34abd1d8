// What the page uses of the libraries.
export { h, render } from "preact";
export { useEffect, useMemo, useRef, useState } from "preact/hooks";
export { html } from "htm/preact";
export { default as uPlot } from "uplot";
