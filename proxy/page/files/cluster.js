// The cluster as it is now: instances in three panels, a line of handoffs, the last requests.
import { ago, amount, count, fill, find, h, seconds, tell } from "./dom.js";
import { extent, strip, summary, walk } from "./stages.js";

const GONE_S = 120; // how long a lost instance is still shown
const NEW_S = 60;
const HISTORY = 90;
const PANELS = {
  encoder: "encode",
  prefill: "prefill",
  decode: "decode",
  prefill_decode: "prefill and decode",
  encode_prefill_decode: "encode, prefill and decode",
};
const SHORT = { encoder: "e", prefill: "p", decode: "d", prefill_decode: "pd", encode_prefill_decode: "epd" };
const BAD = new Set(["gone", "lost", "missing", "refused"]);

const known = new Map(); // id -> {instance, seenS, goneS, returned}
const history = [];

export function topology(cluster) {
  const roles = Object.keys(SHORT).map((role) => {
    const number = cluster.instances.filter((one) => one.role === role && !BAD.has(one.state)).length;
    return number ? `${number}${SHORT[role]}` : "";
  });
  return roles.join("");
}

/** Add what came and went since the last look; returns the instances to show. */
function remember(cluster) {
  const now = cluster.time_s;
  const first = known.size === 0;
  const present = new Set();
  for (const instance of cluster.instances) {
    const before = known.get(instance.id);
    const lost = BAD.has(instance.state);
    present.add(instance.id);
    const again = before && before.instance.started_s !== instance.started_s;
    if (lost && !before?.goneS) tell(`${instance.id} is ${instance.state}.`);
    if (!lost && (again || before?.goneS)) tell(`${instance.id} is back.`);
    if (!lost && !before && !first) tell(`${instance.id} has joined.`);
    known.set(instance.id, { instance, goneS: lost ? (before?.goneS ?? now) : null, again: again || before?.again });
  }
  for (const [id, entry] of known) {
    if (present.has(id)) continue;
    if (!entry.goneS) tell(`${id} is gone.`);
    entry.goneS ??= now;
    entry.instance = { ...entry.instance, state: "gone", reason: "it has left the registry" };
    if (now - entry.goneS > GONE_S) known.delete(id);
  }
  return [...known.values()];
}

export function showCluster(cluster) {
  const entries = remember(cluster);
  history.push(cluster.handoffs_per_s);
  history.splice(0, history.length - HISTORY);
  const order = Object.keys(PANELS);
  const workers = entries.filter(({ instance }) => instance.role !== "proxy");
  workers.sort((a, b) => order.indexOf(a.instance.role) - order.indexOf(b.instance.role) || (a.instance.id < b.instance.id ? -1 : 1));
  const proxies = entries.filter(({ instance }) => instance.role === "proxy");
  fill(find("workers"), workers.map((entry) => card(entry, cluster)));
  find("no-workers").hidden = workers.length > 0;
  const waiting = Object.values(cluster.queues).reduce((sum, queue) => sum + queue.waiting, 0);
  const wait = Math.max(...Object.values(cluster.queues).map((queue) => queue.expected_wait_s));
  fill(
    find("figures"),
    figure("requests running", cluster.requests.running, `of at most ${cluster.requests.limit}`),
    figure("waiting for a token", waiting, wait > 0 ? `a new one: ${seconds(wait)}` : "no queue"),
    figure("handoffs per second", rate(cluster.handoffs_per_s), "over 10 s", sparkline()),
    figure(count(proxies.length, "proxy").replace("proxys", "proxies"), `v${cluster.version ?? "?"}`, `wire version ${cluster.protocol}`),
  );
}

const rate = (value) => (value >= 10 ? Math.round(value) : value.toFixed(1));

function figure(name, value, note, ...more) {
  return h("div", { class: "figure" }, h("dt", {}, name), h("dd", {}, h("b", {}, value), h("small", {}, note), more));
}

function sparkline() {
  const top = Math.max(1, ...history);
  const points = history.map((value, index) => `${(100 * (index + HISTORY - history.length)) / (HISTORY - 1)},${23 - (21 * value) / top}`);
  const line = points.length > 1 ? `M${points.join("L")}` : "";
  return h("svg", { viewBox: "0 0 100 24", preserveAspectRatio: "none", class: "spark", "aria-hidden": "true" }, h("path", { d: line }));
}

function card({ instance, goneS, again }, cluster) {
  const { id, role, state, reason } = instance;
  const up = cluster.time_s - instance.started_s;
  const bad = BAD.has(state);
  const since = goneS ? `for ${seconds(Math.max(1, cluster.time_s - goneS))}` : null;
  const news = !bad && up < NEW_S ? (again ? "started again" : "new") : null;
  const queues = Object.entries(instance.queues).filter(([, number]) => number > 0);
  const next = instance.next_role ? `, then ${PANELS[instance.next_role] ?? instance.next_role}` : "";
  return h(
    "li",
    { class: `card ${role} ${bad ? "bad" : state}`, "data-id": id, "data-state": state },
    h("h3", {}, id, h("small", {}, PANELS[role] ?? role)),
    h("p", { class: "state" }, h("i", { class: "dot" }), state + next, since && h("small", {}, since), news && h("small", { class: "new" }, news)),
    reason && h("p", { class: "reason" }, `${reason}.`),
    !bad && [
      h(
        "p",
        { class: "load" },
        h("b", {}, instance.running ?? "–"),
        role === "encoder" ? " items here " : " running ",
        h("b", {}, instance.waiting ?? "–"),
        " waiting",
      ),
      instance.caches.map(meter),
      queues.length > 0 && h("p", { class: "quiet" }, queues.map(([name, number]) => `${number} ${name}`).join(" · ")),
      h("p", { class: "quiet" }, `up ${seconds(Math.max(0, up))}`, instance.dtype ? ` · ${instance.dtype}` : ""),
    ],
  );
}

function meter({ name, unit, used, capacity }) {
  const share = Math.min(1, used / capacity);
  const text = `${amount(used, unit)} of ${amount(capacity, unit)}${unit === "bytes" ? "" : ` ${unit}`}`;
  const role = { role: "meter", "aria-label": `${name} cache`, "aria-valuemin": 0, "aria-valuemax": capacity, "aria-valuenow": used, "aria-valuetext": text };
  return h(
    "div",
    { class: "meter", ...role },
    h("span", {}, `${name} cache`, h("small", {}, text)),
    h("i", { class: share > 0.9 ? "full" : "", style: { "--share": share } }),
  );
}

/** The last requests, each a button that walks through its stages. */
export function showRequests(requests, nowS, load) {
  const scale = Math.max(0.05, ...requests.map((one) => (one.spans.length ? extent(one.spans).length : 0)));
  find("no-requests").hidden = requests.length > 0;
  fill(
    find("requests"),
    requests.map((request) => {
      const good = request.outcome === "ok" ? "good" : request.outcome === null ? "running" : "bad";
      return h(
        "li",
        { class: good },
        h(
          "button",
          {
            type: "button",
            "data-key": request.id,
            "aria-label": `${request.route}, ${summary(request)}: walk through its stages`,
            disabled: request.spans.length === 0,
            onclick: async () => walk(`${request.route}: ${summary(request)}`, await load(request)),
          },
          h("span", { class: "when" }, ago(nowS - request.created_s)),
          h("span", { class: "what" }, request.route.replace("/v1/", ""), h("small", {}, summary(request))),
          strip(request.spans, scale),
        ),
      );
    }),
  );
}
