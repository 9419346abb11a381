// The stages of a request: their meaning, a waterfall of them, and a walk from one to the next.
import { count, fill, find, h, seconds } from "./dom.js";

export const STAGES = {
  proxy: "The proxy read the request, checked its media, made the prompt and chose the workers.",
  preprocess: "The encoder worker decoded the item and cut it into the shape that its model takes; its size is known from here on.",
  grant: "The item was offered to the worker that needs it, which reserved room. Nothing is computed before there is room for it.",
  encode: "The encoder turned the item into embeddings, together with the items of other requests.",
  handoff: "A tensor moved into reserved room: embeddings from an encoder, or keys and values of a prompt from a prefill worker.",
  queue: "The request waited for its turn and for room in the KV cache.",
  inputs: "The prompt waited for embeddings that had not come yet. Text before them is computed meanwhile.",
  prefill: "The prompt was computed, in pieces beside the tokens of other requests.",
  decode: "Tokens were generated one after the other, and sent as they came.",
  answer: "Tokens are coming. The worker tells its own times at the end.",
};

const WIDTHS = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000];

const place = (span, start, length) => ({
  "--left": `${(100 * Math.max(0, span.start_s - start)) / length}%`,
  "--width": `${(100 * Math.max(0, span.end_s - span.start_s)) / length}%`,
});

export function extent(spans) {
  const start = Math.min(...spans.map((span) => span.start_s));
  return { start, length: Math.max(0.001, Math.max(...spans.map((span) => span.end_s)) - start) };
}

/** A row per stage. `onPick(index)` makes the rows buttons; `picked` is marked. */
export function waterfall(spans, onPick = null, picked = -1) {
  if (!spans.length) return h("p", { class: "quiet" }, "No stage has ended yet.");
  const { start, length } = extent(spans);
  const step = WIDTHS.find((width) => length / width <= 5) ?? length;
  const ticks = Array.from({ length: Math.floor(length / step) + 1 }, (_, index) => index * step);
  const axis = ticks.map((tick) => h("span", { style: { "--left": `${(100 * tick) / length}%` } }, tick ? seconds(tick) : "0"));
  const rows = spans.map((span, index) => {
    const took = seconds(span.end_s - span.start_s);
    const label = `${span.stage} on ${span.instance}, ${took}, after ${seconds(span.start_s - start)}`;
    return h(
      onPick ? "button" : "div",
      {
        class: "row",
        type: onPick && "button",
        "data-key": `stage${index}`,
        "aria-label": label,
        "aria-current": index === picked ? "step" : null,
        onclick: onPick && (() => onPick(index)),
      },
      h("span", { class: "name" }, span.stage, h("small", {}, span.instance)),
      h("span", { class: "track" }, h("i", { class: `bar ${span.stage}`, style: place(span, start, length) })),
      h("span", { class: "took" }, took),
    );
  });
  return h("div", { class: "waterfall" }, h("div", { class: "axis", "aria-hidden": "true" }, axis), rows);
}

/** All stages in a few thin lines, one per instance, `scale` seconds wide. */
export function strip(spans, scale) {
  if (!spans.length) return h("span", { class: "strip" });
  const { start } = extent(spans);
  const lanes = [...new Set(spans.map((span) => span.instance))].slice(0, 6).map((instance) =>
    h(
      "span",
      { class: "lane" },
      spans
        .filter((span) => span.instance === instance)
        .map((span) => h("i", { class: `bar ${span.stage}`, style: place(span, start, scale) })),
    ),
  );
  return h("span", { class: "strip", "aria-hidden": "true" }, lanes);
}

export function summary(request) {
  const { outcome } = request;
  if (outcome === null) return "running";
  const tokens = request.completion_tokens ? `, ${count(request.completion_tokens, "token")}` : "";
  const ended = outcome === "ok" ? "answered" : outcome === "client_left" ? "client left" : outcome.replaceAll("_", " ");
  return `${ended} in ${seconds(request.total_ms / 1000)}${tokens}`;
}

let shown = null; // {spans, index, title}

/** Open the dialog that walks through the stages of a request. */
export function walk(title, spans, index = 0) {
  if (!spans.length) return;
  shown = { title, spans, index };
  draw();
  find("walk").showModal();
}

function draw() {
  const { spans, title, index } = shown;
  const span = spans[index];
  const { start, length } = extent(spans);
  const took = span.end_s - span.start_s;
  find("walk-title").textContent = title;
  fill(find("walk-chart"), waterfall(spans, (to) => go(to - shown.index), index));
  fill(
    find("walk-stage"),
    h("h3", {}, h("i", { class: `swatch ${span.stage}` }), `${span.stage} `, h("small", {}, `on ${span.instance}`)),
    h("p", {}, STAGES[span.stage] ?? "A stage that this page does not know."),
    h(
      "p",
      { class: "quiet" },
      `${seconds(took)}, ${Math.round((100 * took) / length)} % of the request; began after ${seconds(span.start_s - start)}. `,
      beside(spans, span),
    ),
  );
  find("walk-count").textContent = `stage ${index + 1} of ${spans.length}`;
  find("walk-back").disabled = index === 0;
  find("walk-on").disabled = index === spans.length - 1;
}

function beside(spans, span) {
  const others = spans.filter((one) => one !== span && one.start_s < span.end_s && one.end_s > span.start_s);
  const names = [...new Set(others.map((one) => `${one.stage} on ${one.instance}`))].slice(0, 4);
  return names.length ? `At the same time: ${names.join(", ")}.` : "";
}

function go(by) {
  const index = shown.index + by;
  if (index < 0 || index >= shown.spans.length) return;
  shown.index = index;
  draw();
}

export function prepareWalk() {
  find("walk-back").addEventListener("click", () => go(-1));
  find("walk-on").addEventListener("click", () => go(1));
  find("walk").addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 }[event.key];
    if (!by) return;
    event.preventDefault();
    go(by);
  });
  find("walk").addEventListener("click", (event) => event.target === find("walk") && find("walk").close());
}
