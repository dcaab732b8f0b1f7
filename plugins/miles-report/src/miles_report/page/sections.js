
// -------------------------------------------------------------------------------------------------- head and tiles
const TONE = {completed: "good", failed: "bad", running: "plain", starting: "plain"};
const OVER = ["completed", "failed", "interrupted", "killed"];
const going = () => D.run.status === "running" || D.run.status === "starting";
const link = {lost: null, error: null};  // live.js says how it stands with the server
function head() {
  const R = D.run, fact = (k, v, tone) => el("span", {class: tone}, k + " ", el("b", null, v)), meta = el("div", {class: "meta"});
  if (R.began) meta.append(fact("started", when(R.began)));
  if (R.ended) meta.append(fact("ended", when(R.ended)));
  else if (R.last && !LIVE) meta.append(fact("last event", when(R.last)));
  else if (R.last) meta.append(fact("last event", `${span(Math.max(0, now() - R.last))} ago`, going() && now() - R.last > 120 ? "late" : null));
  if (LIVE && D.beat && going()) meta.append(fact("heartbeat", `${span(Math.max(0, now() - D.beat.time))} ago`));
  if (R.starts.length > 1) meta.append(fact("starts", `${R.starts.length}, resumed at rollout ` + R.starts.slice(1).map(s => s.from).join(", ")));
  if (D.against.length) meta.append(fact("against", D.against.map(run => run.name).join(", ")));
  if (R.plan_hash) meta.append(el("span", {title: R.plan_hash}, "plan ", el("code", null, R.plan_hash.slice(0, 16))));
  if (LIVE) meta.append(link.lost ? fact("updates", `lost at ${clock(link.lost)}`, "late")
    : fact("updates", R.status === "completed" ? "ended with the run" : "live"));
  const banner = (tone, text) => el("div", {class: "banner", style: `--c: ${ink(tone)}`}, text);
  refresh($("head"), el("div", {class: "brand"}, LIVE ? "Miles · watch" : "Miles · run report"),
    el("h1", null, R.name, el("span", {class: "pill", id: "status", style: `--c: ${ink(TONE[R.status] || "warn")}`}, R.status)),
    meta, el("div", {class: "chips"}, Object.entries(R.versions).map(([name, version]) => el("span", {class: "chip"}, `${name} ${version}`))),
    ...notices(R).map(([tone, text]) => banner(tone, text)));
  if ($("said").textContent !== R.status) $("said").textContent = R.status;
  document.title = (R.total && !OVER.includes(R.status) ? `${R.done}/${R.total} · ` : "") + `${R.name} · Miles`;
}
function notices(R) {
  const found = [];
  if (R.error) found.push(["bad", R.error]);
  else if (R.status === "running" && !LIVE) found.push(["plain", `The run is going on; this is how it stood on ${when(R.written)}.`]);
  else if (R.status === "waiting") found.push(["plain", "There is no run here yet. It is shown as soon as it begins."]);
  else if (R.status === "starting") found.push(["plain", "The run is being set up: model, engine and trainer."]);
  else if (R.status === "not started") found.push(["warn", "The run was planned, and nothing of it has happened."]);
  else if (R.status === "killed") found.push(["warn", "The run stopped without a word: it was killed, or the machine went down. " +
    "Where --load names its checkpoints, the same command resumes it."]);
  if (D.trouble) found.push(["bad", D.trouble]);
  if (link.error) found.push(["bad", link.error]);
  if (link.lost) found.push(["warn", `miles watch does not answer any more; this is how the run stood at ${clock(link.lost)}.`]);
  return found;
}
const pick = (...names) => D.curves[names.find(name => D.curves[name])];
function tiles() {
  const R = D.run, found = [];
  const tile = (label, value, note, tone, more) => found.push(el("div", {class: "card tile", "data-tile": label}, el("span", null, label),
    el("strong", null, value), note && el("em", {class: tone || ""}, note), more));
  const change = (a, b) => a === b ? ["unchanged", ""] : [`${b >= a ? "+" : "−"}${num(Math.abs(b - a))} overall`, b > a ? "up" : b < a ? "down" : ""];
  const arrow = (a, b) => [el("i", null, `${num(a)} → `), num(b)];
  if (R.starts.length) {
    const left = going() && R.total && R.pace ? R.pace * (R.total - R.done) : null;
    tile("rollouts", R.total ? [many(R.done), el("i", null, ` / ${many(R.total)}`)] : many(R.done),
      left ? `about ${span(left)} left` : R.pace ? `${span(R.pace)} each, lately` : "none is done yet", "",
      R.total ? el("div", {class: "progress", role: "progressbar", "aria-label": "rollouts", "aria-valuemin": 0, "aria-valuemax": R.total, "aria-valuenow": R.done},
        el("i", {style: `width: ${(R.done / R.total * 100).toFixed(1)}%`})) : null);
    const until = LIVE && going() ? now() : R.ended || R.last;
    tile("time", span(R.before + Math.max(0, until - R.starts[R.starts.length - 1].time)), R.starts.length > 1 ? `in ${R.starts.length} starts`
      : left && R.pace ? `${span(R.pace)} a rollout` : null);
  }
  for (const name of D.evals.slice(0, 3)) {
    const c = D.curves[name], a = first(c), b = last(c);
    if (c.x.length === 1) tile(name.replace("eval/", "eval "), num(b), `rollout ${c.x[0]}`);
    else if (b !== undefined) tile(name.replace("eval/", "eval "), arrow(a, b), ...change(a, b), spark(c, "eval"));
  }
  const reward = pick("rollout/raw_reward", "rollout/reward", "rollout/rewards"), length = pick("rollout/response_len/mean", "rollout/response_lengths");
  if (last(reward) !== undefined && reward.x.length === 1) tile("reward", num(last(reward)), `rollout ${reward.x[0]}`);
  else if (last(reward) !== undefined) tile("reward", arrow(first(reward), last(reward)), ...change(first(reward), last(reward)), spark(reward, "rollout"));
  if (length) tile("response length", num(last(length)), "tokens, last rollout", "", spark(length, "rollout"));
  if (D.syncs) tile("engine weights", `v${D.syncs.version}`, `${D.syncs.bytes ? size(D.syncs.bytes) + " in " : ""}${(D.syncs.seconds * 1e3).toFixed(0)} ms a sync`);
  if (D.beat && going()) tile("groups ready", [num(D.beat.finished), el("i", null, ` / ${num(D.beat.capacity)}`)],
    `${num(D.beat.sampling)} being sampled` + (D.beat.oldest_s >= 1 ? `, the oldest for ${span(D.beat.oldest_s)}` : ""));
  $("tiles").style.setProperty("--columns", Math.ceil(found.length / Math.ceil(found.length / 7)));
  refresh($("tiles"), found);
}

// ---------------------------------------------------------------------------------------------------------- curves
const MORE = ["plain", "perf", "train", "sync", "bad", "save"];
function line(name, label, color, more) {  // and beside it those of the runs that this one is compared with
  const of = (c, named, look) => c ? [{label: named, color, x: untied(c.x), y: c.y, ...look}] : [], others = more?.faint ? [] : D.against;
  return [...of(D.curves[name], label ?? (others.length ? D.run.name : null), more),
    ...others.flatMap(run => of(run.curves[name], [label, run.name].filter(Boolean).join(" · "), {faint: true, dash: "2 2"}))];
}
const tail = name => name.split("/").slice(2).join("/");
function scorers() {  // one scorer is the reward itself
  const names = Object.keys(D.curves).filter(name => name.startsWith("rollout/reward/"));
  return names.length > 1 ? names.flatMap((name, i) => line(name, tail(name), MORE[i % MORE.length], {faint: true})) : [];
}
const PANELS = [
  {title: "Reward", log: false, lines: () => [...line("rollout/raw_reward", "rollout", "rollout"), ...scorers(),
    ...D.evals.flatMap((name, i) => line(name, name.replace("/", " "), ["eval", ...MORE][i % 7], {dash: "5 3"}))]},
  {title: "Response length", unit: "tokens", zero: true, log: false, lines: () => [...line("rollout/response_len/mean", "mean", "rollout"),
    ...line("rollout/response_len/median", "median", "plain", {dash: "4 3"}), ...line("rollout/response_len/max", "longest", "perf", {faint: true})]},
  {title: "Shares", unit: "of answers and groups", zero: true, log: false, show: percent, lines: () => [...line("rollout/truncated_ratio", "truncated answers", "bad"),
    ...line("rollout/zero_std/percentage", "groups of one score", "perf"), ...line("rollout/off_policy_tokens", "off-policy tokens", "train")]},
  {title: "Staleness", unit: "versions", zero: true, log: false, lines: () => [...line("rollout/staleness/mean", "mean", "rollout"),
    ...line("rollout/staleness/max", "oldest token", "perf"), ...line("rollout/weight_version/lag", "oldest group", "plain", {dash: "4 3"})]},
  {title: "Queue", unit: "groups, by time", zero: true, log: false, whole: true, time: true, lines: () => [["finished", "ready", "rollout"], ["sampling", "being sampled", "perf"],
    ["capacity", "capacity", "plain", "4 3"]].flatMap(([key, label, color, dash]) => D.queue[key] ? [{...D.queue[key], label, color, dash}] : [])},
  {title: "Loss", lines: () => line("train/loss", null, "train")},
  {title: "Gradient norm", zero: true, lines: () => line("train/grad_norm", null, "train")},
  {title: "KL divergence", lines: () => [...line("train/kl_loss", "to the reference", "train"), ...line("train/ppo_kl", "to the old policy", "plain")]},
  {title: "Entropy", unit: "nats", lines: () => line("train/entropy_loss", null, "train")},
  {title: "Clipped tokens", zero: true, show: percent, lines: () => line("train/pg_clipfrac", null, "train")},
  {title: "Trainer against engine", unit: "distance of log-probs", log: true, lines: () => [...line("train/train_rollout_logprob_abs_diff", "mean", "train"),
    ...line("train/train_rollout_logprob_abs_diff_max", "largest", "perf")]},
];
const panels = PANELS.map(spec => Chart({...spec, key: true}));
$("panels").append(...panels.map(panel => panel.node));

const LEAD = ["raw_reward", "reward", "rewards", "response_len/mean", "response_lengths", "truncated_ratio", "truncated", "loss", "pg_loss", "grad_norm",
  "kl_loss", "ppo_kl", "pg_clipfrac", "entropy_loss", "entropy", "train_rollout_logprob_abs_diff", "step_time", "rollout_time", "train_time", "tokens_per_gpu_per_sec"];
const ORDER = ["eval", "rollout", "train", "perf"], single = new Map();
let grouped = "";
function every() {
  const names = Object.keys(D.curves).filter(name => !/\/step$/.test(name));
  $("every-count").textContent = String(names.length);
  if (!$("every").open) return;
  if (names.join() !== grouped) { grouped = names.join(); group(names); }
  names.forEach(name => single.get(name).draw());
  sift();
}
function group(names) {
  const place = n => { const i = LEAD.indexOf(n.slice(n.indexOf("/") + 1)); return i < 0 ? 99 : i; }, sections = {};
  names.forEach(name => (sections[name.split("/")[0]] ||= []).push(name));
  const rank = name => (ORDER.indexOf(name) + 9) % 9, known = name => ORDER.includes(name) ? name : "plain";
  const parts = Object.keys(sections).sort((a, b) => rank(a) - rank(b)).map(head => {
    const mine = sections[head].sort((a, b) => (D.evals.includes(b) - D.evals.includes(a)) || place(a) - place(b) || (a < b ? -1 : 1));
    mine.filter(name => !single.has(name)).forEach(name => single.set(name,
      Chart({title: name.slice(name.indexOf("/") + 1), lines: () => line(name, null, known(head))})));
    return el("section", null, el("h3", {style: `--c: ${ink(known(head))}`}, head), el("div", {class: "grid"}, mine.map(name => single.get(name).node)));
  });
  $("groups").replaceChildren(...parts);
}
function sift() {
  const text = $("find").value.toLowerCase();
  for (const [name, chart] of single) chart.node.hidden = !D.curves[name] || !name.toLowerCase().includes(text);
  for (const part of $("groups").children) part.hidden = ![...part.querySelectorAll(".chart")].some(chart => !chart.hidden);
}
function curves() {
  measure();
  panels.forEach(panel => panel.draw());
  every();
  const any = Object.keys(D.curves).length > 0;
  $("curves").hidden = !any;
  $("curves-note").textContent = any ? "against rollouts; hover, or Tab and arrow keys, to read all at once" : "";
}
$("every").addEventListener("toggle", every);
$("find").addEventListener("input", sift);
$("smooth").addEventListener("input", curves);

// ------------------------------------------------------------------------------------------ engines, drops, log, plan
function engines() {
  const state = {serving: "good", restarted: "warn", stale: "warn", lost: "bad"}, s = D.syncs, rows = [];
  if (s) rows.push(["all", `weights v${s.version}`, `${s.count} syncs, the last at ${clock(s.time)}; ${s.tensors ?? "–"} tensors`, "good"]);
  for (const e of D.engines) rows.push([e.name, e.state + (e.version ? ` v${e.version}` : ""), `lost ${e.losses} time${e.losses === 1 ? "" : "s"}; ` +
    `${clock(e.time)}${e.why ? ": " + e.why : ""}`, state[e.state]]);
  refresh($("servers"), rows.length ? el("table", null, rows.map(([name, what, why, tone]) => el("tr", null, el("td", null, name),
    el("td", {class: "kind", style: `--c: ${ink(tone || "soft")}`}, what), el("td", {class: "msg"}, why)))) : el("div", {class: "none"}, "No weights have been synced."));
  const most = D.drops.length ? D.drops[0][1] : 1, sum = D.drops.reduce((a, d) => a + d[1], 0);
  refresh($("drops"), el("div", {class: "none"}, sum ? `${sum.toLocaleString()} groups or samples dropped` : "Nothing was dropped."),
    D.drops.map(([reason, n]) => el("div", {class: "drop"}, el("div", null, el("span", null, reason), el("b", null, n.toLocaleString())),
      el("i", {style: `width: ${(n / most * 100).toFixed(1)}%`}))));
}
function plugins() {
  const cells = (tag, words) => el("tr", null, words.map((word, i) => el(tag, {class: i > 1 ? "num" : null}, word)));
  $("plugins").hidden = !D.hooks.length;
  $("plugins-note").textContent = `${D.hooks.length} hooks, ${span(D.hooks.reduce((sum, h) => sum + h.seconds, 0))}; waits of async hooks overlap`;
  $("hooks").replaceChildren(cells("th", ["plugin", "hook", "calls", "seconds", "a call", "of the steps"]),
    ...D.hooks.map(h => cells("td", [h.plugin, h.hook, many(h.calls), num(h.seconds), `${num(h.seconds / h.calls * 1e3)} ms`, none(h.share) ? "–" : percent(h.share)])));
}
function log() {
  const tone = {error: "bad", warning: "warn"}, word = {run_start: "start", run_end: "end"};
  const rows = [...D.log].reverse().map(e => el("tr", null, el("td", null, clock(e.time)),
    el("td", {class: "kind", style: tone[e.level] && `--c: ${ink(tone[e.level])}`}, e.kind === "message" ? e.level : word[e.kind] || e.kind.replace("_", " ")),
    el("td", {class: "msg"}, (none(e.rollout) ? "" : `rollout ${e.rollout}: `) + e.text)));
  $("events").replaceChildren(...(rows.length ? rows : [el("tr", null, el("td", null, "Nothing was logged."))]));
  $("plan-text").textContent = plain(D.plan); $("plan").hidden = !D.plan;
  $("foot").textContent = [LIVE ? "" : `Written on ${when(D.run.written)}.`, ...D.notes.filter(note => LIVE || note.includes("messages"))].join(" ");
}
