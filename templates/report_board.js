// Filters, the address, the theme, and when a family's section is made.

const root = document.documentElement;
root.classList.add("scripted");
const form = document.getElementById("filters");
const rows = [...document.querySelectorAll(".board tbody tr")];
const families = new Map([...document.querySelectorAll("details.family")].map((details) => [details.dataset.family, details]));
const fields = form.elements;
for (const row of rows) row.found = `${row.textContent} ${row.dataset.also}`.toLowerCase().replace(/\s+/g, " ");

let loaded = null;

// The data of all sections, unpacked once.
function load() {
  loaded ||= (async () => {
    const packed = Uint8Array.from(atob(document.getElementById("data").textContent), (letter) => letter.charCodeAt(0));
    return new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
  })();
  return loaded;
}

async function build(details) {
  if (details.dataset.state) return;
  details.dataset.state = "building";
  try {
    buildFamily(await load(), details);
  } catch (error) {
    details.querySelector(".body").replaceChildren(h("p", { class: "note" }, `This section cannot be drawn by this browser (${error.message}). The board is complete.`));
  }
  details.dataset.state = "built";
}

// --- filters -----------------------------------------------------------------------------------------------------

const chosen = () => [...form.querySelectorAll("input[name=verdict]:checked")].map((input) => input.value);

function matches(row, verdicts, terms) {
  const { verdict, backend, claim } = row.dataset;
  return (
    (!verdicts.length || verdicts.includes(verdict)) &&
    (!fields.backend.value || backend === fields.backend.value) &&
    (!fields.claim.value || claim === fields.claim.value) &&
    terms.every((term) => row.found.includes(term))
  );
}

function apply() {
  const verdicts = chosen();
  const terms = fields.q.value.toLowerCase().split(/\s+/).filter(Boolean);
  let count = 0;
  let before = null;
  for (const row of rows) {
    row.hidden = !matches(row, verdicts, terms);
    if (row.hidden) continue;
    count += 1;
    row.classList.toggle("again", before !== null && before.parentNode === row.parentNode);
    before = row;
  }
  for (const body of document.querySelectorAll(".board tbody")) body.hidden = ![...body.rows].some((row) => !row.hidden);
  document.getElementById("count").textContent = `${count} of ${rows.length} shown`;
  document.getElementById("clear").hidden = !(verdicts.length || terms.length || fields.backend.value || fields.claim.value);
  const empty = document.getElementById("empty");
  if (empty) empty.hidden = count > 0;
}

function clear() {
  for (const input of form.querySelectorAll("input[name=verdict]")) input.checked = false;
  for (const name of ["q", "backend", "claim"]) fields[name].value = "";
  changed();
  fields.q.focus();
}

// --- the address: #verdict=capable,limited&backend=cpu&q=llama&family=llama&theme=dark ----------------------------

function address() {
  const found = new URLSearchParams();
  const verdicts = chosen();
  const open = [...families].filter(([, details]) => details.open).map(([name]) => name);
  for (const [name, value] of [["verdict", verdicts.join(",")], ["backend", fields.backend.value], ["claim", fields.claim.value], ["q", fields.q.value], ["family", open.join(",")], ["theme", root.dataset.theme]])
    if (value) found.set(name, value);
  return `#${found.toString().replace(/%2C/g, ",")}`;
}

function remember() {
  if (location.hash !== address() && (location.hash || address() !== "#")) history.replaceState(null, "", address());
}

function changed() {
  apply();
  remember();
}

// An address of another page, typed or shared, is taken as far as it makes sense.
function restore() {
  if (/^#(board|families)$/.test(location.hash)) return remember();
  const plain = /^#family-(.+)$/.exec(location.hash);
  const asked = new URLSearchParams(plain ? { family: plain[1] } : location.hash.slice(1));
  const verdicts = (asked.get("verdict") || "").split(",");
  for (const input of form.querySelectorAll("input[name=verdict]")) input.checked = verdicts.includes(input.value);
  fields.q.value = asked.get("q") || "";
  for (const name of ["backend", "claim"]) {
    const value = asked.get(name) || "";
    fields[name].value = [...fields[name].options].some((option) => option.value === value) ? value : "";
  }
  if (["light", "dark"].includes(asked.get("theme"))) setTheme(asked.get("theme"));
  const open = (asked.get("family") || "").split(",").filter((name) => families.has(name));
  for (const [name, details] of families) details.open = open.includes(name);
  apply();
  if (open.length) show(open[0]);
  return undefined;
}

async function show(name) {
  const details = families.get(name);
  details.open = true;
  await build(details);
  details.scrollIntoView({ block: "start" });
  details.querySelector("summary").focus({ preventScroll: true });
}

// --- the theme ---------------------------------------------------------------------------------------------------

const toggle = document.getElementById("theme");
const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);

function setTheme(name) {
  if (name) root.dataset.theme = name;
  toggle.textContent = isDark() ? "Light theme" : "Dark theme";
  toggle.setAttribute("aria-label", `Switch to the ${isDark() ? "light" : "dark"} theme`);
}

toggle.addEventListener("click", () => {
  setTheme(isDark() ? "light" : "dark");
  remember();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => setTheme());

// --- what starts it ----------------------------------------------------------------------------------------------

form.addEventListener("input", changed);
form.addEventListener("submit", (event) => event.preventDefault());
for (const id of ["clear", "clear-empty"]) document.getElementById(id)?.addEventListener("click", clear);
document.addEventListener("click", (event) => {
  const link = event.target.closest('a[href^="#family-"]');
  if (!link) return;
  event.preventDefault();
  const name = link.getAttribute("href").slice("#family-".length);
  show(name).then(remember);
});
for (const details of families.values())
  details.addEventListener("toggle", () => {
    if (details.open) build(details);
    remember();
  });
matchMedia("(max-width: 820px)").addEventListener("change", () => {
  for (const details of families.values()) {
    delete details.dataset.state;
    if (details.open) build(details);
  }
});
addEventListener("hashchange", restore);
setTheme();
restore();
