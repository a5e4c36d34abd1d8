// Bundles the libraries of the page into one file, and writes down which versions it is made of.
import { createHash } from "node:crypto";
import { copyFileSync, mkdirSync, readFileSync, writeFileSync } from "node:fs";
import { build } from "esbuild";

const out = new URL("../src/farprop/dashboard/static/vendor/", import.meta.url);
const libraries = ["htm", "preact", "uplot"];
const modules = new URL("node_modules/", import.meta.url);

mkdirSync(out, { recursive: true });
await build({
  absWorkingDir: new URL(".", import.meta.url).pathname,
  entryPoints: ["vendor.mjs"],
  outfile: new URL("vendor.js", out).pathname,
  bundle: true,
  minify: true,
  format: "esm",
  target: "es2020",
  legalComments: "none", // whole licences are in LICENSES.txt
});
copyFileSync(new URL("uplot/dist/uPlot.min.css", modules), new URL("uPlot.min.css", out));

const described = libraries.map((name) => {
  const { version, license } = JSON.parse(readFileSync(new URL(`${name}/package.json`, modules), "utf8"));
  const text = readFileSync(new URL(`${name}/LICENSE`, modules), "utf8").trim();
  return { name, version, license, text };
});
const licences = described.map((one) => `${one.name} ${one.version} (${one.license})\n\n${one.text}\n`);
writeFileSync(new URL("LICENSES.txt", out), licences.join(`\n${"-".repeat(80)}\n\n`));

const sha256 = Object.fromEntries(
  ["vendor.js", "uPlot.min.css", "LICENSES.txt"].map((name) => [
    name,
    createHash("sha256").update(readFileSync(new URL(name, out))).digest("hex"),
  ]),
);
const versions = Object.fromEntries(described.map((one) => [one.name, one.version]));
writeFileSync(new URL("manifest.json", out), JSON.stringify({ versions, sha256 }, null, 2) + "\n");
