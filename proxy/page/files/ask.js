// The playground: a question with media, the answer as it streams, and the stages beside it.
import { call, events, Failure, getJson } from "./api.js";
import { amount, count, fill, find, h, KINDS, listed, seconds, tell } from "./dom.js";
import { kindOf, noMicrophone, readFile, record, refusalOf } from "./media.js";
import { walk, waterfall } from "./stages.js";

const LOOK_MS = 300; // at the timeline, while an answer comes
const LATE_LOOKS = 6; // after it: the encoders' stages may come a moment later
const PART = { image: "image_url", audio: "audio_url", video: "video_url" };

let model = null; // what /v1/cluster says of it
let attached = [];
let turns = []; // messages that were answered
let running = null; // AbortController of the answer under way
let stopRecording = null;

const takes = () => model?.media ?? [];

/** Follow the model that is served: what it cannot take is greyed, with the reason. */
export function updateModel(cluster) {
  const same = model && ["model", "media", "chats", "transcribes"].every((name) => `${model[name]}` === `${cluster[name]}`);
  model = cluster;
  if (same) return;
  for (const kind of Object.keys(KINDS)) grey(find(`add-${kind}`), takes().includes(kind) ? null : refusalOf(kind, takes()));
  const deaf = takes().includes("audio") ? noMicrophone() : refusalOf("audio", takes());
  grey(find("record"), deaf);
  const system = model.transcribes ? "a speech model takes none." : model.chats ? null : "a model without conversations takes none.";
  find("system").disabled = system !== null;
  find("system").placeholder = system ? system.replace("a", "A") : "None";
  find("turns-label").hidden = !model.chats || model.transcribes;
  const missing = Object.keys(KINDS).filter((kind) => !takes().includes(kind)).map((kind) => KINDS[kind]);
  const has = takes().map((kind) => KINDS[kind]);
  find("takes").textContent = has.length
    ? `${model.model} takes ${listed(has)}${model.transcribes ? " to transcribe" : ""}; ${listed(missing, "or")} would need another model.`
    : `${model.model} takes text only: pictures, audio or video would need another model.`;
  find("drop-hint").textContent = has.length ? `Drop, paste or choose ${listed(has, "or")}` : "This model takes no files";
  find("sample").hidden = !takes().includes("image");
  find("max-tokens").placeholder = `the rest of ${model.max_model_len}`;
  if (!find("max-tokens").value && model.max_model_len > 2048) find("max-tokens").value = 512;
  const question = { image: "What does the sign say?", audio: "" }[takes()[0]] ?? "Name three colours.";
  if (!find("prompt").value && !model.transcribes) find("prompt").value = question;
  find("prompt").placeholder = model.transcribes ? "Words that were said before, as a hint (optional)" : "Ask something";
}

function grey(button, reason) {
  button.setAttribute("aria-disabled", reason !== null);
  button.title = reason ? `Not here: ${reason}` : "";
}

function problem(sentence) {
  find("ask-problem").textContent = sentence;
}

async function attach(files) {
  problem("");
  for (const file of files) {
    try {
      attached.push(await readFile(file, takes()));
    } catch (error) {
      problem(error.message);
    }
  }
  drawAttached();
}

function drawAttached() {
  fill(
    find("attached"),
    attached.map((item, index) =>
      h(
        "li",
        {},
        preview(item),
        h("span", {}, item.name, h("small", {}, amount(item.size, "bytes"))),
        h("button", { type: "button", class: "plain", "data-key": `drop${index}`, "aria-label": `Remove ${item.name}`, onclick: () => detach(index) }, "×"),
      ),
    ),
  );
}

function detach(index) {
  attached.splice(index, 1);
  drawAttached();
  find("prompt").focus();
}

function preview({ kind, preview: url, name }) {
  if (kind === "image") return h("img", { src: url, alt: name });
  return h(kind, { src: url, controls: true, "aria-label": name });
}

/** The request as it is sent; `url(item)` says how media are written. */
function makeRequest(url) {
  const text = find("prompt").value.trim();
  const options = { model: model.model, stream: true, stream_options: { include_usage: true } };
  const number = (id) => (find(id).value === "" ? undefined : Number(find(id).value));
  options.temperature = number("temperature");
  options.max_tokens = number("max-tokens");
  if (!model.chats) return { path: "/v1/completions", body: { ...options, prompt: text } };
  const parts = attached.map((item) => ({ type: PART[item.kind], [PART[item.kind]]: { url: url(item) } }));
  const content = parts.length ? (text ? [...parts, { type: "text", text }] : parts) : text;
  const before = find("turns").checked && !model.transcribes ? turns : [];
  const system = find("system").disabled ? "" : find("system").value.trim();
  const first = system ? [{ role: "system", content: system }] : [];
  return { path: "/v1/chat/completions", body: { ...options, messages: [...first, ...before, { role: "user", content }] } };
}

async function ask() {
  problem("");
  if (running) return;
  if (!model) return problem("The cluster has not answered yet.");
  if (!find("prompt").value.trim() && !attached.length) return problem("Ask something first, or add a file.");
  if (model.transcribes && attached.length !== 1) return problem("Add one recording: this model transcribes one at a time.");
  const { path, body } = makeRequest((item) => item.url);
  const turn = newTurn();
  running = new AbortController();
  busy(true);
  const state = { text: "", sentS: performance.now() / 1000, firstS: null, usage: null, finish: null, id: null };
  const watching = watch(state, turn);
  try {
    const headers = { "Content-Type": "application/json" };
    const response = await call(path, { method: "POST", headers, body: JSON.stringify(body), signal: running.signal });
    state.id = response.headers.get("x-request-id");
    for await (const event of events(response)) take(event, state, turn);
    if (body.messages) turns = [...body.messages.filter(({ role }) => role !== "system"), { role: "assistant", content: state.text }];
  } catch (error) {
    if (!(error instanceof Failure)) throw error;
    turn.problem.textContent = error.code === "stopped" ? "Stopped." : error.message;
  } finally {
    state.endS = performance.now() / 1000;
    turn.answer.classList.remove("coming");
    turn.meta.textContent = facts(state);
    running = null;
    busy(false);
    if (state.text) tell(`The answer is: ${state.text}`);
    await watching;
  }
}

function newTurn() {
  const answer = h("p", { class: "answer coming" });
  const turn = { answer, meta: h("p", { class: "quiet" }), problem: h("p", { class: "problem" }) };
  const question = h("div", { class: "question" }, attached.map(preview), h("p", {}, find("prompt").value.trim()));
  find("answers").prepend(h("article", {}, question, answer, turn.problem, turn.meta));
  while (find("answers").children.length > 20) find("answers").lastChild.remove();
  return turn;
}

function take(event, state, turn) {
  state.usage = event.usage ?? state.usage;
  for (const choice of event.choices ?? []) {
    const thought = choice.delta?.reasoning_content;
    const text = choice.text ?? choice.delta?.content;
    if (thought) turn.answer.append(h("em", {}, thought));
    if (text) {
      state.firstS ??= performance.now() / 1000;
      state.text += text;
      turn.answer.append(text);
    }
    state.finish = choice.finish_reason ?? state.finish;
  }
}

function facts({ usage, firstS, sentS, endS, finish }) {
  const parts = [];
  if (usage) parts.push(`${usage.prompt_tokens} + ${count(usage.completion_tokens, "token")}`);
  if (firstS !== null) parts.push(`the first after ${seconds(firstS - sentS)}`);
  if (usage?.completion_tokens >= 16 && endS > firstS) parts.push(`${Math.round((usage.completion_tokens - 1) / (endS - firstS))} tokens/s`);
  parts.push(`${seconds(endS - sentS)} in all`);
  if (finish === "length") parts.push("cut at the most tokens");
  return parts.join(" · ");
}

/** Draw the stages of the request while it runs, and until no more come. */
async function watch(state, turn) {
  let seen = -1;
  for (let late = 0; late < LATE_LOOKS; late += state.endS ? 1 : 0) {
    await new Promise((resolve) => setTimeout(resolve, LOOK_MS));
    if (!state.id) {
      if (state.endS) break;
      continue;
    }
    const spans = await getJson(`/v1/requests/${state.id}/timeline`).then((body) => body.spans, () => []);
    if (spans.length === seen && state.endS) continue;
    seen = spans.length;
    drawStages(state, spans);
  }
  if (seen > 0) turn.meta.append(" · ", h("button", { type: "button", class: "link", onclick: () => again(state) }, "its stages"));
}

async function again(state) {
  const { spans } = await getJson(`/v1/requests/${state.id}/timeline`).catch((error) => (problem(error.message), { spans: [] }));
  walk("This request", spans);
}

function drawStages(state, spans) {
  const coming = !state.endS && state.firstS !== null && spans.length;
  const sinceS = coming ? spans[0].start_s + (state.firstS - state.sentS) : 0;
  const now = { stage: "answer", instance: "so far", start_s: sinceS, end_s: spans[0]?.start_s + performance.now() / 1000 - state.sentS };
  fill(find("stages"), waterfall(coming ? [...spans, now] : spans, (index) => spans[index] && walk("This request", spans, index)));
  const instances = new Set(spans.map((span) => span.instance));
  find("stages-note").textContent = spans.length ? `${count(spans.length, "stage")} in ${count(instances.size, "process").replace("processs", "processes")}; choose one to walk through them.` : "";
}

function busy(is) {
  find("ask").disabled = is;
  find("stop").disabled = !is;
  find("answers").setAttribute("aria-busy", is);
}

/** The request as a command; files are read by the shell, from the folder where it runs. */
export function curl() {
  const marks = new Map();
  const mark = (item) => {
    const name = `@@${marks.size}@@`;
    marks.set(name, `${item.url.slice(0, item.url.indexOf(",") + 1)}$(base64 < ${quoted(item.name)} | tr -d '\\n')`);
    return name;
  };
  const { path, body } = makeRequest(mark);
  let text = JSON.stringify({ ...body, stream: false, stream_options: undefined }, null, 2).replace(/[\\$`]/g, "\\$&");
  for (const [name, command] of marks) text = text.replace(name, () => command);
  const key = sessionStorage.length ? ` \\\n  -H "Authorization: Bearer $TRIPTYCH_API_KEY"` : "";
  return `curl ${location.origin}${path} \\\n  -H 'Content-Type: application/json'${key} --data-binary @- <<END\n${text}\nEND\n`;
}

const quoted = (name) => `'${name.replaceAll("'", "'\\''")}'`;

async function copyCurl() {
  problem("");
  if (!model) return problem("The cluster has not answered yet.");
  const button = find("curl");
  try {
    await navigator.clipboard.writeText(curl());
    button.textContent = "Copied";
    tell("The request is copied as a curl command.");
    setTimeout(() => (button.textContent = "Copy as curl"), 1500);
  } catch {
    problem("The browser does not allow copying here; the command stands below.");
    find("command").textContent = curl();
    find("command").hidden = false;
  }
}

async function toggleRecording() {
  const button = find("record");
  if (button.disabled) return;
  button.disabled = true;
  try {
    if (stopRecording) {
      const [stop] = [stopRecording, (stopRecording = null)];
      await attach([await stop()]);
    } else {
      stopRecording = await record();
      tell("Recording.");
    }
  } catch (error) {
    problem(error.message);
  }
  button.disabled = false;
  button.setAttribute("aria-pressed", stopRecording !== null);
  button.lastChild.textContent = stopRecording ? "Stop recording" : "Record";
  button.focus();
}

function prepareFiles() {
  for (const kind of Object.keys(KINDS)) {
    const field = find(`file-${kind}`);
    onPress(`add-${kind}`, () => field.click());
    field.addEventListener("change", async () => {
      await attach([...field.files]);
      field.value = "";
    });
  }
  onPress("record", toggleRecording);
  find("sample").addEventListener("click", async () => {
    const blob = await (await call("/page/sample.png")).blob();
    attach([new File([blob], "sample.png", { type: "image/png" })]);
  });
  const zone = find("composer");
  const over = (is) => (event) => {
    if (![...event.dataTransfer.types].includes("Files")) return;
    event.preventDefault();
    zone.classList.toggle("over", is);
  };
  for (const name of ["dragenter", "dragover"]) zone.addEventListener(name, over(true));
  for (const name of ["dragleave", "drop"]) zone.addEventListener(name, over(false));
  zone.addEventListener("drop", (event) => attach([...event.dataTransfer.files]));
  document.addEventListener("paste", (event) => {
    const files = [...event.clipboardData.files].filter((file) => kindOf(file));
    if (!files.length || document.querySelector("dialog[open]")) return;
    event.preventDefault();
    attach(files);
  });
}

function onPress(id, action) {
  const button = find(id);
  button.addEventListener("click", () => (button.getAttribute("aria-disabled") === "true" ? problem(button.title) : action()));
}

export function prepareAsk() {
  prepareFiles();
  find("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    ask();
  });
  find("prompt").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    ask();
  });
  find("stop").addEventListener("click", () => running?.abort());
  find("curl").addEventListener("click", copyCurl);
  find("clear").addEventListener("click", () => {
    turns = [];
    attached = [];
    drawAttached();
    problem("");
    fill(find("answers"));
    fill(find("stages"), h("p", { class: "quiet" }, "Ask something: the stages of the request appear here."));
    find("stages-note").textContent = "";
    find("prompt").focus();
  });
}
