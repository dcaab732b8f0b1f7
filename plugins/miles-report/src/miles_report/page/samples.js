
// --------------------------------------------------------------------------------------------------------- samples
const S = {file: null, rows: [], at: 0, paint: "lp", follow: true, turn: 0};
let bring = async file => file;  // live.js asks the server for what is in a file
const said = s => s.text !== undefined ? s.text : s.pieces.join("");
const unlikely = s => s.lp.length ? s.lp.reduce((a, b) => a + (b || 0), 0) / s.lp.length : 0;
const title = f => f.name === "rollout" ? `rollout ${f.rollout}` : `eval ${f.name.replace(/^eval_/, "")} at rollout ${f.rollout}`;
const key = f => `${f.name} ${f.rollout}`;
function scoreColor(value, rows) {
  const all = rows.map(s => s.reward).filter(v => v !== null), low = Math.min(...all), high = Math.max(...all);
  if (value === null) return "var(--faint)";
  return high === low ? "var(--soft)" : `color-mix(in srgb, var(--good) ${((value - low) / (high - low) * 100).toFixed(0)}%, var(--bad))`;
}
function follow(on) { S.follow = $("follow").checked = on; }
const newest = () => { const i = D.samples.findLastIndex(f => f.name === "rollout"); return i < 0 ? D.samples.length - 1 : i; };
let offered = "";
function files() {  // fills the choice of files, and shows the newest unless somebody has chosen
  $("samples-bar").hidden = $("browser").hidden = !D.samples.length;
  $("no-samples").hidden = D.samples.length > 0;
  if (!D.samples.length) return;
  const there = JSON.stringify(D.samples.map(f => [f.name, f.rollout, f.stamp]));
  if (there === offered) return;
  const had = $("file").value, groups = {};
  offered = there;
  D.samples.forEach(f => (groups[f.name] ||= el("optgroup", {label: f.name.replace(/^eval_/, "eval ")})).append(el("option", {value: key(f)}, title(f))));
  $("file").replaceChildren(...Object.values(groups));
  const still = D.samples.some(f => key(f) === had);
  $("file").value = still && !S.follow ? had : key(D.samples[newest()]);
  const f = D.samples.find(f => key(f) === $("file").value);
  if (!still || S.follow || !S.file || S.file.stamp !== f.stamp) list($("file").value !== had);
}
function browse() {
  $("follow-label").hidden = !LIVE;
  const shift = by => { const to = D.samples[D.samples.findIndex(f => key(f) === $("file").value) + by]; if (to) { $("file").value = key(to); follow(false); list(true); } };
  const move = by => { follow(false); S.at = Math.max(0, Math.min(S.rows.length - 1, S.at + by)); select(true); };
  $("file").onchange = () => { follow(false); list(true); };
  $("follow").onchange = () => { follow($("follow").checked); if (S.follow) { $("file").value = key(D.samples[newest()]); list(true); } };
  $("older").onclick = () => shift(-1); $("newer").onclick = () => shift(1);
  $("prev").onclick = () => move(-1); $("next").onclick = () => move(1);
  $("sort").onchange = $("query").oninput = () => list(true);
  $("list").onkeydown = e => { const by = {ArrowDown: 1, j: 1, ArrowUp: -1, k: -1}[e.key]; if (by) { e.preventDefault(); move(by); } };
}
async function list(fresh) {
  const turn = ++S.turn, f = await bring(D.samples.find(f => key(f) === $("file").value));
  if (turn !== S.turn || !f) return;  // another file was chosen meanwhile
  if (fresh) S.at = 0;
  S.file = f;
  const q = $("query").value.toLowerCase(), order = $("sort").value, sign = order[0] === "-" ? -1 : 1;
  S.rows = f.samples.filter(s => !q || [s.prompt, said(s), s.label].join("\n").toLowerCase().includes(q));
  const value = s => order === "lp" ? unlikely(s) : s[order.replace("-", "")] ?? -Infinity;
  if (order) S.rows = [...S.rows].sort((a, b) => (value(a) - value(b)) * sign);
  const nodes = [];
  S.rows.forEach((s, i) => {
    if (!order && (i === 0 || S.rows[i - 1].uid !== s.uid)) {
      const same = f.samples.filter(o => o.uid === s.uid && o.reward !== null), mean = same.reduce((a, b) => a + b.reward, 0) / same.length;
      nodes.push(el("div", {class: "group", role: "presentation"}, el("span", null, `prompt ${s.uid} · row ${s.row}`), el("span", null, same.length ? `mean ${num(mean)}` : "")));
    }
    nodes.push(el("div", {class: "row", id: `row-${i}`, role: "option", "data-at": i, onclick: () => { follow(false); S.at = i; select(); }},
      el("b", {style: `color: ${scoreColor(s.reward, f.samples)}`}, num(s.reward)),
      el("span", null, (order ? s.prompt.trim().slice(-60).replace(/\s+/g, " ") + " ▸ " : "") + said(s).slice(0, 160).replace(/\s+/g, " "))));
  });
  $("list").replaceChildren(...nodes);
  $("count").textContent = `${S.rows.length} of ${f.samples.length} samples` + (f.samples_left ? `, ${f.samples_left} more in the run` : "") +
    (f.groups > f.recorded ? `; ${f.recorded} of ${f.groups} groups were recorded` : "");
  select();
}
function select(scroll) {
  const box = $("list");
  box.querySelectorAll(".row").forEach(row => { const on = +row.dataset.at === S.at; row.classList.toggle("on", on); row.setAttribute("aria-selected", String(on)); });
  const row = box.querySelector(".row.on");
  box.setAttribute("aria-activedescendant", row ? row.id : "");
  if (row && scroll) box.scrollTop = Math.max(0, row.offsetTop - box.clientHeight / 2);
  S.rows.length ? detail(S.rows[S.at]) : $("detail").replaceChildren(el("div", {class: "soft"}, "No sample matches."));
}
const at = (column, k) => Array.isArray(column) ? column[k] : column;
function tokens(s) {
  const versions = Array.isArray(s.ver) ? [...new Set(s.ver)].sort((a, b) => a - b) : [];
  const box = el("div", {class: "text", tabindex: 0, "aria-label": "response; arrow keys go through its tokens"}, s.text !== undefined ? s.text : s.pieces.map((piece, k) => {
    const lp = s.lp[k], off = at(s.mask, k) === 0;
    const shade = off ? "" : S.paint === "lp" ? (none(lp) ? "" : `background: rgba(var(--hot), ${Math.min(.85, -lp / 5 * .85).toFixed(3)})`)
      : `background: hsl(${versions.indexOf(at(s.ver, k)) * 67 + 200} 70% 55% / .3)`;
    const shown = piece === "" ? el("span", {class: "nl"}, "∅") : piece.includes("\n")
      ? piece.split("\n").flatMap((part, i) => i ? [el("span", {class: "nl"}, "↵"), "\n" + part] : [part]) : piece;
    return el("span", {class: off ? "t off" : "t", style: shade, "data-k": k}, shown);
  }), s.cut ? el("span", {class: "soft"}, ` … ${s.cut.toLocaleString()} more tokens`) : null);
  let here = -1;
  const tell = (place, k) => {
    const lp = s.lp[k], p = none(lp) ? "" : `\nlog-prob ${lp.toFixed(3)}  p ${Math.exp(lp) >= .001 ? Math.exp(lp).toFixed(3) : Math.exp(lp).toExponential(1)}`;
    tip(place, `${JSON.stringify(s.pieces[k])}\nid ${s.ids[k]}${p}\nversion ${at(s.ver, k) ?? "–"}   ${at(s.mask, k) === 0 ? "masked: not trained" : "trained"}\ntoken ${+k + 1} of ${s.n}`);
  };
  box.onpointermove = e => { const t = e.target.closest(".t"); t ? tell(e, t.dataset.k) : tip(null, ""); };
  box.onkeydown = e => {
    const by = {ArrowRight: 1, ArrowLeft: -1}[e.key], all = box.querySelectorAll(".t");
    if (!by || !all.length) return;
    e.preventDefault();
    if (all[here]) all[here].classList.remove("here");
    here = Math.max(0, Math.min(all.length - 1, here + by));
    const spot = all[here].getBoundingClientRect();
    all[here].classList.add("here");
    tell({clientX: spot.left, clientY: spot.bottom}, here);
  };
  box.onpointerleave = box.onblur = () => tip(null, "");
  return box;
}
function detail(s) {
  const fact = (k, v, style) => el("div", null, el("span", null, k), el("b", {style}, v)), mixed = Array.isArray(s.ver) && s.ver.length > 0;
  const facts = el("div", {class: "facts"}, fact("reward", num(s.reward), `color: ${scoreColor(s.reward, S.file.samples)}`),
    Object.entries(s.rewards).length > 1 ? Object.entries(s.rewards).map(([k, v]) => fact(k, num(v))) : Object.keys(s.rewards).map(k => fact("scorer", k)),
    s.adv !== null ? fact("advantage", num(s.adv)) : null, s.label !== null ? fact("label", s.label) : null,
    fact("status", s.status, s.status === "completed" ? null : "color: var(--warn)"), fact("tokens", String(s.n)),
    fact("prompt / sample", `${s.uid} / ${s.i}`), mixed ? fact("versions", `${Math.min(...s.ver)}–${Math.max(...s.ver)}`)
      : s.ver.length === 0 ? null : fact("version", String(s.ver)));
  const paint = mixed ? S.paint : "lp";
  const flip = mixed && el("button", {class: "tiny", onclick: () => { S.paint = S.paint === "lp" ? "ver" : "lp"; detail(s); }},
    paint === "lp" ? "colour by version" : "colour by log-prob");
  S.paint = paint;
  $("detail").replaceChildren(facts, el("div", {class: "cap"}, "prompt"), ...pictures(s), el("div", {class: "text prompt", tabindex: 0, "aria-label": "prompt"}, s.prompt),
    el("div", {class: "cap"}, "response", paint === "lp" ? el("span", null, "likely", el("span", {class: "scale"}), "unlikely") : el("span", null, "by weight version"),
      at(s.mask, 0) === 0 || Array.isArray(s.mask) && s.mask.includes(0) ? el("span", {class: "t off"}, "masked") : null, flip || null),
    tokens(s), ...siblings(s));
}
function pictures(s) {
  if (!(s.images || []).length) return [];
  return [el("div", {class: "pictures"}, s.images.map((name, i) => { const src = S.file.images[name];
    return src ? el("img", {src, alt: `image ${i + 1} of the prompt`, title: name}) : el("span", {title: name}, "cannot be shown"); }))];
}
function siblings(s) {
  const others = S.file.samples.filter(o => o.uid === s.uid && o !== s);
  if (!others.length) return [];
  return [el("div", {class: "cap"}, "other answers to this prompt"), el("div", {class: "others"}, others.map(o => el("button", {class: "row",
    onclick: () => { const i = S.rows.indexOf(o); follow(false); if (i >= 0) { S.at = i; select(true); } else detail(o); }},
    el("b", {style: `color: ${scoreColor(o.reward, S.file.samples)}`}, num(o.reward)), el("span", null, said(o).slice(0, 300).replace(/\s+/g, " ")))))];
}
