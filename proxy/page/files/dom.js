// Elements and words: small helpers without state.

/** Make an element. `on…` are listeners, `style` an object, null and false attributes are left out. */
export function h(tag, attributes = {}, ...children) {
  const svg = tag === "svg" || tag === "path";
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, to] of Object.entries(value)) element.style.setProperty(key, to);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export const find = (id) => document.getElementById(id);

/** Replace the children of an element, and give the focus back to the child of the same data-key. */
export function fill(element, ...children) {
  const focused = element.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  element.replaceChildren(...children.flat(Infinity).filter(Boolean));
  if (focused) element.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
}

export function seconds(value) {
  if (value > 0 && value < 0.0005) return "< 1 ms";
  if (value < 0.9995) return `${Math.round(value * 1000)} ms`;
  if (value < 60) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  if (value < 3600) return `${Math.floor(value / 60)} min`;
  return value < 86400 ? `${(value / 3600).toFixed(1)} h` : `${Math.floor(value / 86400)} d`;
}

export const ago = (s) => (s < 1 ? "now" : `${s < 60 ? `${Math.floor(s)} s` : seconds(s)} ago`);

export function amount(value, unit) {
  if (unit !== "bytes") return `${value}`;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = value ? Math.min(4, Math.floor(Math.log2(value) / 10)) : 0;
  const scaled = value / 1024 ** power;
  return `${scaled >= 100 || power === 0 ? Math.round(scaled) : scaled.toFixed(1)} ${units[power]}`;
}

export const count = (number, word) => `${number} ${word}${number === 1 ? "" : "s"}`;

/** "image" → "pictures": words for the kinds of media. */
export const KINDS = { image: "pictures", audio: "audio", video: "video" };

export function listed(words, last = "and") {
  return words.length < 2 ? words.join("") : `${words.slice(0, -1).join(", ")} ${last} ${words.at(-1)}`;
}

let telling = 0;
/** Tell a change to those who listen to the page. */
export function tell(sentence) {
  clearTimeout(telling);
  find("news").textContent = "";
  telling = setTimeout(() => (find("news").textContent = sentence), 50);
}
