"use strict";
// Elements, numbers and plots. Every text of the run goes through textContent: responses are not to be trusted.
const $ = id => document.getElementById(id), SVG = $("seed").namespaceURI;
let D = JSON.parse($("data").textContent);  // the document; live.js adds to it
const LIVE = !!D.after;

// Marks that have what follows them in a line read from the other side are shown, not followed.
const plain = text => text.replace(/[\u202a-\u202e\u2066-\u2069]/g, "\ufffd");
function put(node, props, kids) {
  for (const [key, value] of Object.entries(props || {}))
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined) node.setAttribute(key, value);
  for (const kid of kids.flat(Infinity)) if (kid !== null && kid !== undefined && kid !== false) node.append(typeof kid === "string" ? plain(kid) : kid);
  return node;
}
// Brings the children of a node up to date; those that are as they were stay, with the selection and focus in them.
function refresh(box, ...kids) {
  const fresh = [...put(document.createDocumentFragment(), null, kids).childNodes], had = [...box.childNodes];
  fresh.forEach((kid, i) => !had[i] ? box.append(kid) : kid.isEqualNode(had[i]) || had[i].replaceWith(kid));
  had.slice(fresh.length).forEach(kid => kid.remove());
}
const el = (tag, props, ...kids) => put(document.createElement(tag), props, kids);
const svg = (tag, props, ...kids) => put(document.createElementNS(SVG, tag), props, kids);
const ink = color => `var(--${color})`;

// ---------------------------------------------------------------------------------------------- numbers and times
const none = v => v === null || v === undefined;
const num = v => none(v) ? "–" : v === 0 ? "0" : Math.abs(v) >= 1e5 || Math.abs(v) < 1e-3 ? v.toExponential(2)
  : Number.isInteger(v) ? String(v) : v.toFixed(Math.abs(v) >= 100 ? 1 : Math.abs(v) >= 10 ? 2 : 3);
const percent = v => none(v) ? "–" : `${(v * 100).toFixed(v > 0 && v < .1 ? 1 : 0)} %`;
const many = v => v.toLocaleString("en"), few = new Intl.NumberFormat("en", {notation: "compact", maximumSignificantDigits: 3});
const tick = v => Math.abs(v) >= 1e4 && Math.abs(v) < 1e12 ? few.format(v).toLowerCase() : Math.abs(v) >= 1e12 || (v !== 0 && Math.abs(v) < 1e-3) ? v.toExponential(1).replace(".0e", "e") : String(+v.toPrecision(4));
const when = t => t ? new Date(t * 1000).toLocaleString(undefined, {dateStyle: "medium", timeStyle: "short"}) : "–";
const clock = (t, seconds = true) => new Date(t * 1000).toLocaleTimeString([], {hour: "2-digit", minute: "2-digit",
  second: seconds ? "2-digit" : undefined, hour12: false});
const two = v => String(Math.floor(v)).padStart(2, "0");
const span = s => s >= 86400 ? `${Math.floor(s / 86400)} d ${Math.floor(s % 86400 / 3600)} h`
  : s >= 3600 ? `${Math.floor(s / 3600)} h ${two(s % 3600 / 60)} min` : s >= 60
  ? `${Math.floor(s / 60)} min ${two(s % 60)} s` : `${s.toFixed(s < 10 ? 1 : 0)} s`;
const size = b => b >= 1e9 ? `${(b / 1e9).toFixed(2)} GB` : b >= 1e6 ? `${(b / 1e6).toFixed(1)} MB` : `${(b / 1e3).toFixed(0)} kB`;
const behind = D.run.written - Date.now() / 1000;  // a browser's clock is not the server's
const now = () => LIVE ? Date.now() / 1000 + behind : D.run.written;
const first = c => c && c.y.find(v => v !== null), last = c => c && c.y.findLast(v => v !== null);

function tip(event, text) {
  const box = $("tip"); box.style.display = text ? "block" : "none"; if (!text) return; box.textContent = plain(text);
  box.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - box.offsetWidth - 8)) + "px";
  box.style.top = (event.clientY + 22 + box.offsetHeight > innerHeight ? event.clientY - box.offsetHeight - 12
    : event.clientY + 18) + "px";
}

// ------------------------------------------------------------------------------------------------------------- axes
function nice(low, high, count) {
  const raw = (high - low) / count || 1, mag = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].find(s => s * mag >= raw * .999) * mag, out = [];
  for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + step * 1e-9; v += step) out.push(+v.toPrecision(12));
  return out;
}
const MOMENTS = [1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 43200, 86400, 172800, 604800];
function moments(low, high) {
  const step = MOMENTS.find(s => (high - low) / s <= 4) || 2592000, shift = new Date(low * 1000).getTimezoneOffset() * 60, out = [];
  for (let t = Math.ceil((low - shift) / step) * step + shift; t <= high; t += step)
    out.push([t, step >= 86400 ? new Date(t * 1000).toLocaleDateString([], {month: "short", day: "numeric"}) : clock(t, step < 60)]);
  return out;
}
function smoothed(ys, weight) {
  let mean = 0, total = 0;  // debiased, so that the first points are not pulled towards 0
  return ys.map(v => { if (v === null) return null; mean = mean * weight + v * (1 - weight);
    total = total * weight + 1 - weight; return mean / total; });
}
function untied(xs) {  // several values of one rollout are spread within it
  if (!xs.some((x, i) => x === xs[i + 1])) return xs;
  const out = [];
  for (let i = 0, j; i < xs.length; i = j) { for (j = i; xs[j] === xs[i]; j++); for (let k = i; k < j; k++) out.push(xs[i] + (k - i) / (j - i)); }
  return out;
}
function nearest(xs, x) {
  let a = 0, b = xs.length - 1;
  while (a < b) { const m = (a + b) >> 1; if (xs[m] < x) a = m + 1; else b = m; }
  return a > 0 && x - xs[a - 1] < xs[a] - x ? a - 1 : a;
}

// ----------------------------------------------------------------------------------------------------------- charts
const W = 360, H = 160, L = 42, B = 18, T = 8, P = 10, charts = [];
const across = {low: 0, high: 1};  // the rollouts that all charts span
function measure() {
  const ends = [D, ...D.against].flatMap(run => Object.values(run.curves)).flatMap(c => [c.x[0], c.x[c.x.length - 1]]);
  [across.low, across.high] = [Math.min(0, ...ends), Math.max(1, ...ends)];
}
// spec: title, unit, lines() -> [{label, color, x, y, faint, dash}], and at will time (x in seconds), zero (the axis
// begins there), whole (no fractions on it), show (a value as text), log (true: from the start, false: never), key (reached with Tab).
function Chart(spec) {
  const plot = svg("svg", {viewBox: `0 0 ${W} ${H}`, role: "img", tabindex: spec.key ? 0 : null}), keys = el("div", {class: "keys"});
  const button = el("button", {class: "tiny", "aria-pressed": "false", hidden: "", onclick: () => { log = !log; draw(); }}, "log");
  const node = el("div", {class: "card chart"}, el("header", null, el("b", {title: spec.title}, spec.title),
    spec.unit ? el("small", null, spec.unit) : null, button), plot, keys);
  let lines = [], log = spec.log === true, px, py, cross, low, high, at = null;
  const show = spec.show || num;

  function draw() {
    lines = spec.lines().filter(line => line.x.length > (spec.time ? 1 : 0));  // a moment is no course of time
    node.hidden = !lines.length;
    if (!lines.length) return;
    const weight = +$("smooth").value;
    lines.forEach(line => { line.shown = weight && line.x.length >= 12 && !spec.time ? smoothed(line.y, weight) : line.y; });
    const real = lines.flatMap(line => line.y).filter(v => v !== null);
    low = real.reduce((a, b) => Math.min(a, b), Infinity); high = real.reduce((a, b) => Math.max(a, b), -Infinity);
    const loggable = spec.log !== false && real.length > 1 && low > 0 && high / low > 8, logged = log && loggable;
    button.hidden = !loggable; button.setAttribute("aria-pressed", String(logged)); button.classList.toggle("on", logged);
    const [x0, x1] = spec.time ? [lines[0].x[0], Math.max(...lines.map(l => l.x[l.x.length - 1]), lines[0].x[0] + 1)] : [across.low, across.high];
    px = x => L + (x - x0) / (x1 - x0) * (W - L - P); px.back = p => x0 + (p - L) / (W - L - P) * (x1 - x0);
    scale(logged, real.length);
    const marks = px.ticks = spec.time ? moments(x0, x1) : nice(x0, x1, 5).filter(Number.isInteger).map(v => [v, String(v)]);
    plot.replaceChildren(
      ...py.ticks.map(v => svg("g", null, svg("line", {class: "rule", x1: L, x2: W - P, y1: py(v), y2: py(v)}),
        svg("text", {x: L - 6, y: py(v) + 3.5, "text-anchor": "end"}, spec.show ? show(v) : tick(v)))),
      ...marks.map(([v, text]) => svg("text", {x: px(v), y: H - 4, "text-anchor": "middle"}, text)),
      ...(spec.time ? [] : D.run.starts.slice(1).map((s, i) => svg("line", {class: "start", x1: px(s.from), x2: px(s.from), y1: T, y2: H - B},
        svg("title", null, `start ${i + 2}`)))),
      ...[...lines].sort((a, b) => !!b.faint - !!a.faint).map(stroke), cross = svg("g", {class: "cross", visibility: "hidden"}));
    mark(at);
  }
  function scale(logged, any) {
    const f = logged ? Math.log10 : v => v;
    let a = any ? f(low) : 0, b = any ? f(high) : 1;
    if (b - a < 1e-12) { const pad = Math.abs(a) * .1 || 1; a -= pad; b += pad; } else { const pad = (b - a) * .06; a -= pad; b += pad; }
    if (!logged && low >= 0 && (a < 0 || spec.zero)) a = 0;
    const flat = any && low === 0 && high === 0;
    py = v => H - B - (f(v) - a) / (b - a) * (H - B - T);
    const powers = logged ? nice(a, b, 3).filter(Number.isInteger).map(v => 10 ** v) : [];
    py.ticks = flat ? [0] : !logged ? nice(a, b, 4).filter(v => !spec.whole || Number.isInteger(v)) : powers.length > 1 ? powers : [low, high];
  }
  function stroke(line) {
    const path = (ys, more) => {
      let d = "", pen = "M";
      ys.forEach((v, i) => { if (v === null) pen = "M"; else { d += `${pen}${px(line.x[i]).toFixed(1)} ${py(v).toFixed(1)}`; pen = "L"; } });
      return svg("path", {d, fill: "none", stroke: ink(line.color), "stroke-linejoin": "round", "stroke-dasharray": line.dash, ...more});
    };
    const wide = line.faint ? 1.1 : 1.8;
    return svg("g", null,
      line.shown !== line.y && path(line.y, {"stroke-width": 1.2, opacity: .22}),
      path(line.shown, {"stroke-width": wide, opacity: line.faint ? .6 : 1}),
      line.x.length <= 24 && !line.faint && line.x.map((x, i) => line.y[i] !== null && svg("circle", {cx: px(x), cy: py(line.shown[i]), r: 2.1, fill: ink(line.color)})),
      line.x.map((x, i) => line.y[i] === null && svg("text", {x: px(x), y: H - B - 2, "text-anchor": "middle", class: "lost"}, "×",
        svg("title", null, `rollout ${x}: not finite`))));
  }
  function mark(x) {  // null: the latest
    at = x;
    if (!lines.length) return;
    const dots = [];
    keys.replaceChildren(x === null ? "" : el("span", {class: "at"}, spec.time ? clock(x) : `rollout ${Math.round(x)}`), ...lines.map(line => {
      let i = x === null ? line.x.length - 1 : nearest(line.x, x);
      if (x === null) while (i > 0 && line.shown[i] === null) i--;
      const v = line.shown[i];
      if (x !== null && v !== null) dots.push(svg("circle", {cx: px(line.x[i]), cy: py(v), r: 3.3, fill: ink(line.color), stroke: "var(--card)", "stroke-width": 1.5}));
      return el("span", {style: `--c: ${ink(line.color)}`, class: line.faint ? "faint" : null}, line.label && el("i", {class: line.dash ? "dash" : null}), line.label,
        el("b", null, v === null ? "not finite" : show(v)));
    }));
    plot.setAttribute("aria-label", `${spec.title}: ${[...keys.children].map(key => key.textContent).join(", ")}`);
    cross.setAttribute("visibility", x === null ? "hidden" : "visible");
    if (x !== null) cross.replaceChildren(svg("line", {x1: px(x), x2: px(x), y1: T, y2: H - B}), ...dots);
  }
  const point = x => spec.time ? mark(x) : charts.forEach(chart => chart.node.offsetParent && chart.mark(x));
  plot.addEventListener("pointermove", event => {
    const box = plot.getBoundingClientRect(), x = px.back((event.clientX - box.left) / box.width * W);
    point(lines[0].x[nearest(lines[0].x, x)]);
  });
  for (const leave of ["pointerleave", "blur"]) plot.addEventListener(leave, () => spec.time ? mark(null) : charts.forEach(chart => chart.mark(null)));
  plot.addEventListener("keydown", event => {
    const by = {ArrowLeft: -1, ArrowRight: 1}[event.key], xs = lines[0].x;
    if (!by) return;
    event.preventDefault();
    point(xs[Math.max(0, Math.min(xs.length - 1, (at === null ? xs.length : nearest(xs, at)) + by))]);
  });
  const chart = {title: spec.title, node, draw, mark: x => spec.time || mark(x)};
  charts.push(chart);
  return chart;
}
function spark(curve, color) {
  const ys = curve.y.filter(v => v !== null), low = Math.min(...ys), range = Math.max(...ys) - low || 1;
  if (ys.length < 2) return null;
  const d = ys.map((v, i) => `${i ? "L" : "M"}${(i / (ys.length - 1) * 200).toFixed(1)} ${(24 - (v - low) / range * 22).toFixed(1)}`);
  return svg("svg", {viewBox: "0 0 200 26", preserveAspectRatio: "none", "aria-hidden": "true"}, svg("path",
    {d: d.join(""), fill: "none", stroke: ink(color), "stroke-width": 1.6, "vector-effect": "non-scaling-stroke"}));
}

// --------------------------------------------------------------------------------------------------- time per stage
const STAGES = ["rollout", "score", "train", "sync", "other"];
function stack() {
  const bars = D.stages, box = $("stack"), w = Math.max(300, box.clientWidth - 34), h = 190, left = 46, bottom = 20;
  $("time").hidden = !bars.length;
  if (!bars.length) return;
  const names = STAGES.filter(s => bars.some(bar => bar.took[s])), most = Math.max(20, Math.min(160, Math.floor(w / 5)));
  const step = Math.ceil(bars.length / most), bins = [];  // neighbours are averaged when there are too many bars
  for (let i = 0; i < bars.length; i += step) {
    const mine = bars.slice(i, i + step), n = mine.reduce((a, bar) => a + bar.n, 0);
    bins.push({from: mine[0].from, to: mine[mine.length - 1].to, n, t: names.map(s => mine.reduce((a, bar) => a + (bar.took[s] || 0) * bar.n, 0) / n)});
  }
  const totals = names.map((_, k) => bins.reduce((a, bin) => a + bin.t[k] * bin.n, 0)), all = totals.reduce((a, b) => a + b, 0);
  const top = Math.max(...bins.map(bin => bin.t.reduce((a, c) => a + c, 0))), y = v => h - bottom - v / top * (h - bottom - 8);
  const slot = (w - left) / bins.length, wide = Math.max(1, slot - Math.min(2, slot * .2)), every = Math.ceil(bins.length / Math.max(3, w / 100));
  const plot = svg("svg", {viewBox: `0 0 ${w} ${h}`, role: "img",
    "aria-label": "time per stage: " + names.map((s, k) => `${s} ${span(totals[k])}`).join(", ")},
    nice(0, top, 4).map(v => [svg("line", {class: "rule", x1: left, x2: w, y1: y(v), y2: y(v)}),
      svg("text", {x: left - 6, y: y(v) + 3.5, "text-anchor": "end"}, tick(v) + " s")]));
  bins.forEach((bin, i) => {
    let sum = 0; const bar = svg("g");
    names.forEach((s, k) => { if (!bin.t[k]) return; const y1 = y(sum + bin.t[k]);
      bar.append(svg("rect", {x: left + i * slot, width: Math.min(wide, 60), y: y1, height: Math.max(.3, y(sum) - y1), fill: ink(s)})); sum += bin.t[k]; });
    bar.append(svg("rect", {x: left + i * slot, width: slot, y: 0, height: h - bottom, fill: "transparent"}));
    bar.addEventListener("pointermove", e => tip(e, `rollout ${bin.from}${bin.to > bin.from ? "–" + bin.to + ", mean" : ""}   ${sum.toFixed(2)} s\n` +
      names.map((s, k) => [s, bin.t[k]]).filter(r => r[1]).map(([s, v]) => `${s.padEnd(8)} ${v.toFixed(3).padStart(8)} s`).join("\n")));
    bar.addEventListener("pointerleave", () => tip(null, ""));
    plot.append(bar);
    if (i % every === 0) plot.append(svg("text", {x: left + i * slot + Math.min(wide, 60) / 2, y: h - 5, "text-anchor": "middle"}, String(bin.from)));
  });
  box.replaceChildren(el("div", {class: "legend"}, names.map((s, k) => el("span", null, el("i", {style: `background: ${ink(s)}`}), s,
    el("b", null, `${(totals[k] / all * 100).toFixed(1)} % · ${span(totals[k])}`)))), plot);
}
