// The section of a family, made when it is opened.

const TIERS = ["static", "trace", "numeric", "checkpoint"];
const EMPTY = {};

// A check of the data by name: [[code, name, tier], status, reason, figures, where, reproduce].
function checkOf(data, index) {
  const [name, status, reason, figures, where, reproduce] = data.checks[index];
  const [code, text, tier] = data.names[name];
  return { code, name: text, tier, status, reason, figures: figures || EMPTY, where, reproduce };
}

function resultOf(data, [name, verdict, reason, indices, seconds, unclaimed]) {
  return { name, verdict, reason, seconds, unclaimed, checks: indices.map((index) => checkOf(data, index)) };
}

const find = (result, code) => result.checks.find((check) => check.code === code);
const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);

function command(text) {
  const button = h("button", { type: "button", class: "copy", "aria-label": `Copy the command ${text}` }, "Copy");
  button.addEventListener("click", async () => {
    const done = await copied(text);
    button.textContent = done ? "Copied" : "Select it";
    setTimeout(() => (button.textContent = "Copy"), 1600);
  });
  return h("div", { class: "command" }, h("code", {}, text), button);
}

// A page opened from a file may have no clipboard of its own; a selection can be copied anyway.
async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = h("textarea", { class: "sr", readonly: "" });
    area.value = text;
    const before = document.activeElement;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    if (before) before.focus();
    return done;
  }
}

function part(title, ...children) {
  return h("section", { class: "part" }, h("h5", {}, title), ...children);
}

function later(summary, make, attributes = { class: "more" }) {
  const details = h("details", attributes, h("summary", {}, summary));
  details.addEventListener("toggle", () => details.open && details.childElementCount === 1 && details.append(...[make()].flat()));
  return details;
}

// --- figures -----------------------------------------------------------------------------------------------------

const MOST_LINES = 4;

function shown(path, value) {
  if (typeof value === "number" && /bytes$/.test(path)) return bytes(value);
  if (typeof value === "number") return number(value);
  if (isObject(value)) return Object.entries(value).map(([name, inner]) => `${name}: ${shown(name, inner)}`).join("; ");
  if (!Array.isArray(value)) return String(value);
  if (value.length > 8 && value.every((item) => typeof item === "number")) {
    const [low, high] = [Math.min(...value), Math.max(...value)];
    return `${value.length} numbers, ${low === high ? `all ${number(low)}` : `${number(low)} to ${number(high)}`}`;
  }
  return value.length ? value.map((item) => (Array.isArray(item) ? `[${shown("", item)}]` : shown("", item))).join(", ") : "none";
}

// One line of plain figures, then one for each group of them; of many, some wait behind "more".
function figures(check) {
  const entries = Object.entries(check.figures).map(([name, value]) => (name === "layers" && layersOf(value) ? [name, pattern(layersOf(value))] : [name, value]));
  const pairs = (list) => list.map(([name, value]) => h("span", {}, h("b", {}, name), " ", prose(shown(name, value))));
  const flat = entries.filter(([, value]) => !isObject(value));
  const lines = flat.length ? [h("div", { class: "figures" }, pairs(flat))] : [];
  for (const [name, value] of entries)
    if (isObject(value)) lines.push(h("div", { class: "figures" }, h("b", { class: "group" }, name), " ", pairs(Object.entries(value))));
  if (lines.length <= MOST_LINES) return lines;
  return [...lines.slice(0, MOST_LINES - 1), later(`${lines.length - MOST_LINES + 1} more`, () => lines.slice(MOST_LINES - 1))];
}

// --- what decided ------------------------------------------------------------------------------------------------

// A check decides where the reason begins with its code; evidence that lapsed, or is missing, has a reason of its own.
function deciding(results) {
  const found = new Map();
  for (const result of results) {
    if (!["not-capable", "undecided"].includes(result.verdict)) continue;
    const check = result.checks.find(({ code, status }) => ["fail", "not-run"].includes(status) && result.reason.startsWith(`${code} `));
    const key = JSON.stringify([check ? [check.code, check.reason] : result.reason, result.unclaimed]);
    if (!found.has(key)) found.set(key, [check, result, []]);
    found.get(key)[2].push(result.name);
  }
  return [...found.values()].map(([check, { reason, unclaimed }, names]) => {
    if (!check) return h("div", { class: "decided open" }, h("p", {}, prose(reason || "No reason is given.")), h("p", { class: "muted" }, names.join(", ")));
    return h(
      "div",
      { class: check.status === "fail" && !unclaimed ? "decided" : "decided open" },
      h("p", {}, h("strong", {}, h("code", {}, check.code), " ", prose(check.name)), check.status === "fail" ? " fails" : " was not run", unclaimed ? h("span", { class: "muted" }, " · nothing is claimed of this") : null),
      h("p", {}, prose(check.reason)),
      h("dl", {}, check.where ? [h("dt", {}, "where"), h("dd", {}, h("code", {}, check.where))] : [], h("dt", {}, "configurations"), h("dd", {}, names.join(", "))),
      check.reproduce ? command(check.reproduce) : null,
      command(`mlx-audit explain ${check.code}`),
    );
  });
}

// --- layers, errors, faults, cost --------------------------------------------------------------------------------

function layersPart(results, room) {
  const groups = new Map();
  const lacking = [];
  for (const result of results) {
    const topology = find(result, "TOP001");
    const layers = topology && layersOf(topology.figures.layers);
    if (!layers) lacking.push([result.name, topology]);
    else {
      const key = layers.join("\n");
      if (!groups.has(key)) groups.set(key, [layers, []]);
      groups.get(key)[1].push(result.name);
    }
  }
  const strips = [...groups.values()].map(([layers, names]) =>
    h("div", {}, h("div", { class: "strip-name" }, h("span", { class: "mono" }, names.join(", ")), h("span", { class: "muted" }, ` · ${plural(layers.length, "cache")}`)), strip(layers, room), h("ul", { class: "legend" }, stripLegend(layers))),
  );
  const why = new Map();
  for (const [name, topology] of lacking) {
    const text = !topology ? "TOP001 is missing" : topology.figures.kinds ? `made before the order of layers was kept; TOP001 counts ${shown("", Object.entries(topology.figures.kinds).map(([kind, count]) => `${count} × ${kind}`))}` : `TOP001: ${topology.reason || words(topology.status)}`;
    why.set(text, [...(why.get(text) || []), name]);
  }
  const notes = [...why].map(([text, names]) => h("p", { class: "note" }, h("span", { class: "mono" }, names.join(", ")), `: no strip (${text}).`));
  return part("Layers: the cache of each, in order", h("div", { class: "strips" }, strips), ...notes);
}

function errorPlot(result, room) {
  const parity = find(result, "PAR001");
  const naive = find(result, "NEG001");
  const own = parity && (isObject(parity.figures.float32) ? parity.figures.float32 : parity.figures);
  const curves = [];
  if (own && Array.isArray(own.differences) && own.differences.length) curves.push({ name: "compiled", look: "compiled", points: curvePoints(own.differences, Number.isInteger(own.steps_a_difference) ? own.steps_a_difference : 1) });
  const wrong = naive && naive.figures.relative_differences;
  if (Array.isArray(wrong) && wrong.length) curves.push({ name: "naive compile", look: "naive", points: curvePoints(wrong, 1) });
  return { lacks: !curves.length || curves[0].look !== "compiled", curves, draw: () => plot(curves, own && typeof own.allowed === "number" ? own.allowed : null, room, `Error at each step, ${result.name}`) };
}

function errorsPart(results, room) {
  const ran = results.filter((result) => ["PAR001", "NEG001"].some((code) => find(result, code) && !find(result, code).figures.on && Object.keys(find(result, code).figures).length));
  const plots = ran.map((result) => [result, errorPlot(result, room)]).filter(([, made]) => made.curves.length);
  if (!plots.length) return part("Error at each step", h("p", { class: "note" }, "Not measured here: PAR001 was not run, or does not apply."));
  const [first, ...rest] = plots;
  const view = ([result, made]) => [
    h("div", { class: "strip-name" }, h("span", { class: "mono" }, result.name), h("span", { class: "muted" }, " · relative to the largest logit, float32")),
    made.draw(),
    made.lacks ? h("p", { class: "note" }, "Compiled decoding is not drawn: these results were made before differences were kept step by step, or PAR001 did not get so far.") : null,
  ];
  return part("Error at each step, against eager decoding", ...view(first), rest.length ? later(`${plural(rest.length, "more configuration")}`, () => rest.flatMap((pair) => h("div", { class: "part" }, view(pair)))) : null);
}

function killsPart(data, kills, room) {
  const title = "Planted faults, by the check that must see them";
  if (!kills) return part(title, h("p", { class: "note" }, "No summary: no fault was planted for this evidence."));
  const names = (list) => list.map((index) => data.faults[index]);
  const rows = kills.killed.map(([code, list]) => [code, "killed", names(list)]);
  if (kills.survived.length) rows.unshift(["not seen", "survived", names(kills.survived)]);
  if (kills.unshown.length) rows.push(["not shown", "unshown", names(kills.unshown)]);
  const killed = kills.killed.reduce((sum, [, list]) => sum + list.length, 0);
  const text = `${killed} seen, ${kills.survived.length} not seen, ${kills.unshown.length} that this model has no place for, or whose check fails anyway`;
  const table = () =>
    h("table", { class: "names" }, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Check"), h("th", { scope: "col" }, "Fault"))), h("tbody", {}, rows.map(([label, , list]) => h("tr", {}, h("th", { scope: "row" }, label), h("td", {}, list.join(", "))))));
  return part(title, h("p", { class: "strip-name" }, `${text}. Profile ${kills.profile}.`), rows.length ? matrix(rows, room, text) : null, rows.length ? later("Names of the faults", table) : null);
}

function costPart(results) {
  const found = results.map((result) => [result, find(result, "TRC002")]).filter(([, check]) => check && isObject(check.figures.cost));
  if (!found.length) return part("Cost of a step", h("p", { class: "note" }, "Not known: TRC002 did not get so far."));
  // Of a cache that has one size whatever the capacity.
  const constant = (cost) => (cost.cache_bytes >= cost.weights_bytes ? "any" : "never");
  const equal = (cost) => (cost.equal_capacity === 0 ? constant(cost) : number(cost.equal_capacity));
  const cells = ({ cost }) => [shown("bytes", cost.weights_bytes), shown("bytes", cost.cache_bytes), number(cost.capacity), number(cost.primitives), equal(cost)];
  const heads = ["Configuration", "Weights read", "Cache read", "at capacity", "Primitives", "Cache as large as weights at"];
  return part(
    "Cost of a step",
    h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Cost of a step" }, h("table", { class: "costs" }, h("thead", {}, h("tr", {}, heads.map((head, at) => h("th", { scope: "col", class: at ? "num" : null }, head)))), h("tbody", {}, found.map(([result, check]) => h("tr", {}, h("th", { scope: "row", class: "mono" }, result.name), cells(check.figures).map((text) => h("td", { class: "num" }, text))))))),
  );
}

// --- checks ------------------------------------------------------------------------------------------------------

function tally(result) {
  const counts = {};
  for (const check of result.checks) counts[check.status] = (counts[check.status] || 0) + 1;
  return ["fail", "not-run", "pass", "not-applicable"].filter((status) => counts[status]).map((status) => `${counts[status]} ${words(status)}`).join(" · ");
}

function checkRow(check) {
  const about = [check.reason ? h("div", { class: "reason" }, prose(check.reason)) : null, check.where ? h("div", { class: "reason" }, h("span", { class: "muted" }, "at "), h("code", {}, check.where)) : null, ...figures(check), check.reproduce ? command(check.reproduce) : null];
  return h(
    "tr",
    {},
    h("th", { scope: "row", class: "mono" }, check.code),
    h("td", {}, h("span", { class: `status s-${check.status}` }, icon(check.status), words(check.status))),
    h("td", {}, prose(check.name)),
    h("td", {}, ...about),
  );
}

function checksTable(result) {
  const heads = [["Check", "k-code"], ["Status", "k-status"], ["What must hold", "k-name"], ["Reason and figures", ""]];
  const tiers = TIERS.map((tier) => [tier, result.checks.filter((check) => check.tier === tier)]).filter(([, checks]) => checks.length);
  return h(
    "table",
    { class: "checks", "aria-label": `Checks of ${result.name}` },
    h("thead", {}, h("tr", {}, heads.map(([head, look]) => h("th", { scope: "col", class: look }, head)))),
    tiers.map(([tier, checks]) => h("tbody", {}, h("tr", { class: "tier" }, h("th", { scope: "rowgroup", colspan: 4 }, tier)), checks.map(checkRow))),
  );
}

function checksPart(results) {
  return part(
    "Checks, by configuration",
    results.map((result) => {
      const details = later("", () => checksTable(result), { class: "configuration" });
      details.firstChild.append(h("span", { class: "verdict" }, badge(result.verdict)), h("span", { class: "mono" }, result.name), h("span", { class: "tally" }, [tally(result), result.seconds ? `${result.seconds} s` : ""].filter(Boolean).join(" · ")));
      return details;
    }),
  );
}

// --- a variant in one place --------------------------------------------------------------------------------------

const STANDINGS = { undecided: "cannot be decided", "claims nothing": "which moves nothing" };

function block(data, packed, room) {
  const results = packed.results.map((result) => resultOf(data, result));
  const inner = room - 50;
  const half = room > 980 ? (inner - 40) / 2 : inner;
  const claims = packed.claims.map(([name, claimed, standing, , only]) => `${name}${only ? ` of ${only}` : ""}: claimed ${claimed ? words(claimed) : "nothing"}, ${STANDINGS[standing] || standing}`);
  const simple = /^[A-Za-z0-9_][A-Za-z0-9_.-]*$/.test(packed.target);
  return h(
    "article",
    { class: "block", "aria-label": `${packed.variant}, ${data.places[packed.place]}` },
    h("header", {}, h("h4", {}, packed.variant), h("span", { class: "muted" }, data.places[packed.place]), badge(packed.claims[0][3]), h("span", { class: "sub" }, claims.join("; "))),
    packed.limits.length ? h("ul", { class: "limits" }, packed.limits.map((limit) => h("li", {}, limit))) : null,
    ...deciding(results),
    layersPart(results, half),
    packed.kills
      ? h("div", { class: "two" }, h("div", {}, errorsPart(results, half), costPart(results)), h("div", {}, killsPart(data, packed.kills, half)))
      : h("div", { class: "two" }, h("div", {}, errorsPart(results, half)), h("div", {}, costPart(results), killsPart(data, packed.kills, half))),
    checksPart(results),
    part("Audit it again", simple ? command(`mlx-audit run ${packed.target}`) : h("p", { class: "mono" }, packed.target)),
    later("Digests, profile and seed", () => h("dl", { class: "small-list" }, Object.entries({ ...packed.digests, profile: packed.profile, seed: packed.seed }).map(([name, text]) => [h("dt", {}, name), h("dd", { class: "mono" }, String(text))]))),
  );
}

function buildFamily(data, details) {
  const body = details.querySelector(".body");
  const room = body.clientWidth || document.querySelector("main").clientWidth - 60;
  body.replaceChildren(...(data.families[details.dataset.family] || []).map((packed) => block(data, packed, room)));
}
