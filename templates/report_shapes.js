// Elements and drawings. Every text goes in as a text node, so that no name can become markup.

const SVG = "http://www.w3.org/2000/svg";
let drawings = 0;

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) if (value != null) node.setAttribute(name, value);
  for (const child of children.flat()) if (child != null) node.append(child);
  return node;
}

const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const s = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
const icon = (name) => s("svg", { class: "icon", "aria-hidden": "true" }, s("use", { href: `#i-${name}` }));
const words = (name) => String(name).replace(/-/g, " ");
const badge = (verdict) => h("span", { class: `badge v-${verdict}` }, icon(verdict), words(verdict));
// Text in which `code` stands between backquotes; with an odd one it is taken as it is.
function prose(text) {
  const pieces = String(text).split("`");
  return pieces.length % 2 ? pieces.map((piece, at) => (at % 2 ? h("code", {}, piece) : piece)) : [String(text)];
}
const plural = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;

function drawing(width, height, title, description, ...children) {
  const id = `drawing-${++drawings}`;
  return s(
    "svg",
    { class: "drawing", role: "img", width, height, viewBox: `0 0 ${width} ${height}`, "aria-labelledby": `${id}-t ${id}-d` },
    s("title", { id: `${id}-t` }, title),
    s("desc", { id: `${id}-d` }, description),
    ...children,
  );
}

// Numbers as people read them: 2,053 · 7.39e−6 · 1.6 GB.
function number(value) {
  if (typeof value !== "number") return value == null ? "–" : String(value);
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  const text = size < 1e-3 || size >= 1e6 ? value.toExponential(2).replace(/\.?0+e/, "e") : String(Number(value.toPrecision(4)));
  return text.replace(/-/g, "−");
}

function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let at = 0;
  for (; value >= 999.5 && at < units.length - 1; at += 1) value /= 1000;
  return `${at && value < 99.95 ? value.toFixed(1) : Math.round(value)} ${units[at]}`;
}

// --- the layers as a strip ---------------------------------------------------------------------------------------

const KINDS = ["linear", "rotating", "chunked", "quantized", "arrays", "composite", "none"];
const MOST_LAYERS = 2000;
const kindOf = (label) => (KINDS.includes(label.split("(")[0]) ? label.split("(")[0] : "unknown");

// The layers as a list of labels, or null where the figures are of another form, or too many to be drawn.
function layersOf(runs) {
  if (!Array.isArray(runs) || !runs.length) return null;
  const layers = [];
  for (const run of runs) {
    if (!Array.isArray(run) || typeof run[0] !== "string" || !Number.isInteger(run[1]) || run[1] < 1) return null;
    if (layers.length + run[1] > MOST_LAYERS) return null;
    for (let at = 0; at < run[1]; at += 1) layers.push(run[0]);
  }
  return layers;
}

// A kind's second set of parameters is drawn with a digit, as `inspect` does.
function marksOf(layers) {
  const marks = new Map();
  const seen = new Map();
  for (const label of layers) {
    if (marks.has(label)) continue;
    const kind = kindOf(label);
    const nth = (seen.get(kind) || 0) + 1;
    seen.set(kind, nth);
    marks.set(label, nth === 1 ? "" : nth < 10 ? String(nth) : "+");
  }
  return marks;
}

function periodOf(layers) {
  for (let period = 1; period <= Math.min(layers.length / 2, 20); period += 1)
    if (layers.every((label, at) => at < period || label === layers[at - period])) return period > 1 ? period : 10;
  return 10;
}

const CELL = 12;
const TALL = 18;

function cell(kind, mark, x, y) {
  const box = (left, top, width, height, look = "cell") => s("rect", { class: look, x: x + left, y: y + top, width, height, rx: 1.5 });
  const line = (path) => s("path", { class: "cell-line", "stroke-width": 1.6, d: path });
  const full = CELL - 2;
  const shapes = {
    linear: () => [box(0, 0, full, TALL)],
    rotating: () => [box(0, 0, full, TALL, "cell-faint"), box(0, TALL / 2, full, TALL / 2)],
    chunked: () => [box(0, 0, full, TALL, "cell-faint"), box(0, 0, full / 2, TALL / 2), box(full / 2, TALL / 2, full / 2, TALL / 2)],
    quantized: () => [box(0, 0, full, TALL, "cell-faint"), line([3, 9, 15].map((top) => `M${x} ${y + top}h${full}`).join(""))],
    arrays: () => [s("circle", { class: "cell-line", cx: x + full / 2, cy: y + TALL / 2, r: 4, "stroke-width": 2 })],
    composite: () => [box(0, 0, full, TALL, "cell-faint"), line(`M${x} ${y + TALL / 2}h${full}M${x + full / 2} ${y}v${TALL}`)],
    none: () => [s("circle", { class: "cell", cx: x + full / 2, cy: y + TALL / 2, r: 1.6 })],
    unknown: () => [s("rect", { class: "cell-line", x: x + 0.5, y: y + 0.5, width: full - 1, height: TALL - 1 })],
  };
  const outside = ["arrays", "none", "unknown", "composite", "quantized"].includes(kind);
  const text = kind === "unknown" ? mark || "?" : mark;
  const digit = text && s("text", { class: outside ? "digit out" : "digit", x: x + full / 2, y: y + TALL - 3 }, text);
  return s("g", { class: `k-${kind}` }, ...shapes[kind](), digit || null);
}

// "(1×rotating, 1×linear) × 12", or the runs where nothing repeats.
function pattern(layers) {
  const runs = (list) => {
    const found = [];
    for (const label of list)
      if (found.length && found[found.length - 1][0] === label) found[found.length - 1][1] += 1;
      else found.push([label, 1]);
    return found;
  };
  const all = runs(layers);
  const show = (list) => list.map(([label, count]) => `${count} × ${label}`).join(", ");
  for (let period = 2; period <= layers.length / 2; period += 1)
    if (all.length > 2 && layers.length % period === 0 && layers.every((label, at) => at < period || label === layers[at - period]))
      return `(${show(runs(layers.slice(0, period)))}) × ${layers.length / period}`;
  return all.length > 24 ? `${show(all.slice(0, 24))}, …` : show(all);
}

function strip(layers, room) {
  const marks = marksOf(layers);
  const group = periodOf(layers);
  const left = layers.length > 9 ? 30 : 0;
  const gap = 5;
  const perRow = Math.max(group, Math.floor(Math.min(room - left, 560) / (group * CELL + gap)) * group);
  const rows = Math.ceil(layers.length / perRow);
  const cells = layers.map((label, at) => {
    const place = at % perRow;
    return cell(kindOf(label), marks.get(label), left + place * CELL + Math.floor(place / group) * gap, Math.floor(at / perRow) * (TALL + 8) + 1);
  });
  const numbers = left ? Array.from({ length: rows }, (_, row) => s("text", { x: left - 8, y: row * (TALL + 8) + 14, "text-anchor": "end" }, String(row * perRow))) : [];
  const width = left + Math.min(layers.length, perRow) * CELL + Math.ceil(Math.min(layers.length, perRow) / group) * gap;
  return drawing(width, rows * (TALL + 8), `${plural(layers.length, "cache")}, in order`, pattern(layers), ...numbers, ...cells);
}

function stripLegend(layers) {
  const counts = new Map();
  for (const label of layers) counts.set(label, (counts.get(label) || 0) + 1);
  const marks = marksOf(layers);
  return [...counts].map(([label, count]) =>
    h("li", {}, s("svg", { width: CELL, height: TALL + 2, "aria-hidden": "true" }, cell(kindOf(label), marks.get(label), 1, 1)), `${count} × ${label}`),
  );
}

// --- error per step ----------------------------------------------------------------------------------------------

// One curve: points [step, value]; a value that is no finite number stands above all others.
function curvePoints(values, every) {
  return values.slice(0, 400).map((value, at) => [every * at + 1, typeof value === "number" && value >= 0 ? value : Infinity]);
}

function plot(curves, allowed, room, title) {
  const width = Math.max(280, Math.min(room, 620));
  const height = 276;
  const [left, right, top, bottom] = [46, 104, 16, 66];
  const values = [...curves.flatMap((curve) => curve.points.map((point) => point[1])), allowed].filter((value) => value > 0 && value < Infinity);
  const low = Math.floor(Math.log10(Math.min(1e-6, ...values)));
  const high = Math.max(low + 2, Math.ceil(Math.log10(Math.max(1, ...values))));
  const last = Math.max(2, ...curves.flatMap((curve) => curve.points.map((point) => point[0])));
  const floor = height - bottom;
  const zero = floor + 20;
  const x = (step) => left + ((step - 1) / (last - 1)) * (width - left - right);
  const y = (value) => (value === 0 ? zero : value === Infinity ? top - 6 : floor - ((Math.log10(value) - low) / (high - low)) * (floor - top));
  const parts = [s("rect", { class: "zero-band", x: left, y: floor + 10, width: width - left - right, height: 20 })];
  const every = Math.ceil((high - low) / 6);
  for (let power = high; power >= low; power -= every) {
    parts.push(s("line", { class: "grid", x1: left, x2: width - right, y1: y(10 ** power), y2: y(10 ** power) }));
    parts.push(s("text", { x: left - 8, y: y(10 ** power) + 4, "text-anchor": "end" }, power === 0 ? "1" : `1e${power}`.replace("-", "−")));
  }
  parts.push(s("text", { x: left - 8, y: zero + 4, "text-anchor": "end" }, "0"));
  parts.push(s("line", { class: "axis", x1: left, x2: width - right, y1: floor + 30, y2: floor + 30 }));
  const stride = Math.max(1, Math.round((last - 1) / Math.min(8, last - 1)));
  for (let step = 1; step <= last; step += stride) parts.push(s("text", { x: x(step), y: floor + 45, "text-anchor": "middle" }, String(step)));
  parts.push(s("text", { x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle" }, "step after the prompt"));
  const ends = [];
  if (allowed != null) {
    parts.push(s("line", { class: "allowed curve dashed", x1: left, x2: width - right, y1: y(allowed), y2: y(allowed) }));
    ends.push(["allowed", allowed === 0 ? "allowed: 0" : "allowed", y(allowed), width - right]);
  }
  for (const curve of curves) {
    const path = curve.points.map(([step, value], at) => `${at ? "L" : "M"}${x(step).toFixed(1)} ${y(value).toFixed(1)}`).join("");
    parts.push(s("path", { class: `${curve.look} curve`, d: path }));
    for (const [step, value] of curve.points) {
      const tip = s("title", {}, `${curve.name}, step ${step}: ${value === Infinity ? "not finite" : number(value)}`);
      const [cx, cy] = [x(step), y(value)];
      const round = s("circle", { class: "mark", cx, cy, r: last > 40 ? 2 : 2.8 }, tip);
      parts.push(s("g", { class: curve.look }, curve.look === "naive" ? s("path", { class: "mark", d: `M${cx} ${cy - 4.2}l4.2 4.2-4.2 4.2-4.2-4.2z` }, tip) : round));
    }
    const end = curve.points[curve.points.length - 1];
    if (end) ends.push([curve.look, curve.name, y(end[1]), x(end[0])]);
  }
  parts.push(...endLabels(ends));
  return drawing(width, height, title, described(curves, allowed), ...parts);
}

// Names at the ends of the curves, moved apart where they would cover each other.
function endLabels(ends) {
  ends.sort((one, other) => one[2] - other[2]);
  let above = -Infinity;
  return ends.map(([look, name, at, x]) => {
    above = Math.max(at + 4, above + 14);
    return s("g", { class: look }, s("text", { class: "label", x: x + 9, y: above }, name));
  });
}

function described(curves, allowed) {
  const list = curves.map((curve) => {
    const found = curve.points.map((point) => (point[1] === Infinity ? "not finite" : number(point[1])));
    return found.every((text) => text === "0") ? `${curve.name}: 0 at each of ${plural(found.length, "point")}` : `${curve.name}: ${found.join(", ")}`;
  });
  return `Largest difference of the logits from eager decoding, relative to the largest logit, at each step. ${list.join(". ")}. Allowed: ${allowed == null ? "not said" : number(allowed)}.`;
}

// --- planted faults ----------------------------------------------------------------------------------------------

function faultSquare(fate, name, x, y) {
  const mark = { killed: "M2.6 5.2l1.9 1.9 3-3.9", survived: "M3 3l4 4m0-4l-4 4" }[fate];
  const inset = fate === "unshown" ? 0.75 : 0;
  return s(
    "g",
    { transform: `translate(${x} ${y})` },
    s("rect", { class: `fault-${fate}`, x: inset, y: inset, width: 10 - 2 * inset, height: 10 - 2 * inset, rx: 2 }),
    mark ? s("path", { class: "fault-mark", d: mark }) : null,
    s("title", {}, `${name}: ${{ killed: "seen", survived: "NOT SEEN", unshown: "could not be shown" }[fate]}`),
  );
}

function matrix(rows, room, description) {
  const [left, right, pitch, tall] = [104, 4, 13, 20];
  const perRow = Math.max(6, Math.floor((Math.min(room, 620) - left - right) / pitch));
  const parts = [];
  let y = 0;
  for (const [label, fate, names] of rows) {
    parts.push(s("text", { class: fate === "survived" ? "code not-seen" : "code", x: 0, y: y + 13 }, label));
    parts.push(s("text", { class: "count", x: left - 12, y: y + 13 }, String(names.length)));
    names.forEach((name, at) => parts.push(faultSquare(fate, name, left + (at % perRow) * pitch, y + 4 + Math.floor(at / perRow) * pitch)));
    const lines = Math.max(1, Math.ceil(names.length / perRow));
    y += tall + (lines - 1) * pitch;
  }
  const widest = Math.min(Math.max(...rows.map((row) => row[2].length)), perRow);
  return drawing(left + widest * pitch + right, y + 2, "Planted faults, by the check that is named for them", description, ...parts);
}
