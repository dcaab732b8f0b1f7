
// --------------------------------------------------------------------------------- miles watch: ask for what is new
const EACH = 1000, SELDOM = 5000, PATIENCE = 30000, KEEP = 8;  // milliseconds; files of samples
async function ask(path) {
  const answer = await fetch(path, {cache: "no-store", signal: AbortSignal.timeout(PATIENCE)}), data = await answer.json();
  if (!answer.ok) throw Object.assign(new Error(data.error), {told: true});
  return data;
}
function extend(have, more) { have.x.push(...more.x); have.y.push(...more.y); }
function extendAll(have, more) {
  for (const [name, c] of Object.entries(more)) have[name] ? extend(have[name], c) : have[name] = c;
}
function sorted(c) {  // an evaluation beside training may come late
  if (!c.x.some((x, i) => x > c.x[i + 1])) return;
  const order = c.x.map((_, i) => i).sort((a, b) => c.x[a] - c.x[b]);
  [c.x, c.y] = [order.map(i => c.x[i]), order.map(i => c.y[i])];
}
function merge(news) {
  if (!news.part) { D = news; return; }
  extendAll(D.curves, news.curves); extendAll(D.queue, news.queue);
  D.evals.concat(news.evals).forEach(name => D.curves[name] && sorted(D.curves[name]));
  const stages = D.stages.concat(news.stages), limit = D.limit;
  const log = D.log.concat(news.log), old = log.length - limit.messages;
  D = {...D, ...news, curves: D.curves, queue: D.queue, stages, log: old > 0 ? log.slice(old) : log};
}
// What was thinned grows at full resolution: from time to time it is asked for thinned again.
const full = () => [...Object.values(D.curves), ...Object.values(D.queue)].some(c => c.x.length > 2 * D.limit.points) || D.stages.length > 4 * D.limit.bars;

const held = new Map();
bring = async file => {
  const name = key(file), had = held.get(name);
  if (had && had.stamp === file.stamp) return had;
  try {
    const got = {...await ask(`samples?${new URLSearchParams({name: file.name, rollout: file.rollout})}`), stamp: file.stamp};
    held.delete(name); held.set(name, got);
    if (held.size > KEEP) held.delete(held.keys().next().value);
    return got;
  } catch (error) { return had || {...file, samples: [], samples_left: 0, recorded: 0, groups: 0}; }
};

let timer, asking = false;
async function poll() {
  if (asking) return;
  asking = true; clearTimeout(timer);
  const had = D.after, status = D.run.status, troubled = link.lost || link.error;
  try {
    merge(await ask(`data${full() ? "" : `?after=${encodeURIComponent(had)}`}`));
    link.lost = link.error = null;
  } catch (error) {
    if (error.told) { link.error = error.message; link.lost = null; } else link.lost ||= now();
  }
  asking = false;
  if (D.after !== had || D.run.status !== status || !!troubled !== !!(link.lost || link.error)) show(); else { head(); tiles(); files(); }
  wait();
}
function wait() {
  clearTimeout(timer);
  if (D.run.status === "completed" && !link.lost && !link.error) return;  // a look at the tab asks again
  timer = setTimeout(poll, document.hidden || OVER.includes(D.run.status) || link.lost || link.error ? SELDOM : EACH);
}
document.addEventListener("visibilitychange", () => { if (!document.hidden) poll(); });
wait();
