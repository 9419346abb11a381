// The page: looks at the cluster once a second while somebody can see it, and puts the parts together.
import { prepareAsk, updateModel } from "./ask.js";
import { forgetKey, getJson, hasKey } from "./api.js";
import { showCluster, showRequests, topology } from "./cluster.js";
import { fill, find, h } from "./dom.js";
import { prepareWalk, STAGES } from "./stages.js";

const PAUSE_MS = 1000;
const LISTED = 12;
let timer = 0;
let awaitsKey = false;

async function look() {
  clearTimeout(timer);
  if (document.hidden || awaitsKey) return;
  try {
    const [cluster, requests] = await Promise.all([getJson("/v1/cluster"), getJson(`/v1/requests?limit=${LISTED}`)]);
    showCluster(cluster);
    showRequests(requests.data, cluster.time_s, spansOf);
    updateModel(cluster);
    status(cluster.ready ? "ready" : "not ready", cluster.reason, `${cluster.model} · ${topology(cluster)}`);
  } catch (error) {
    awaitsKey = error.code === "key";
    if (error.code) status(awaitsKey ? "locked" : "lost", error.message);
    else throw error;
  } finally {
    timer = setTimeout(look, PAUSE_MS);
  }
}

function status(state, problem, title) {
  find("status").dataset.state = state;
  find("status-text").textContent = state === "lost" ? "no answer" : state;
  if (title) find("model").textContent = title;
  if (title) document.title = `${title} · Triptych`;
  find("problem").textContent = problem ? (/[.!?]$/.test(problem) ? problem : `Requests cannot be served now: ${problem}.`) : "";
  find("unlock").hidden = state !== "locked";
  find("lock").hidden = !hasKey();
}

/** All spans of a request: the list has the first of many only. */
async function spansOf(request) {
  if (request.spans.length === request.num_spans) return request.spans;
  return (await getJson(`/v1/requests/${encodeURIComponent(request.id)}/timeline`)).spans;
}

function unlock() {
  awaitsKey = false;
  look();
}

find("unlock").addEventListener("click", unlock);
find("lock").addEventListener("click", () => {
  forgetKey();
  location.reload();
});
document.addEventListener("key", unlock);
document.addEventListener("visibilitychange", look);
fill(find("legend"), Object.keys(STAGES).filter((stage) => stage !== "answer").map((stage) => h("li", { title: STAGES[stage] }, h("i", { class: `swatch ${stage}` }), stage)));
prepareWalk();
prepareAsk();
look();
