// The proxy's API: keys, errors as sentences, streams.
import { find } from "./dom.js";

const STORE = "triptych-key";
let asking = null;

export const hasKey = () => sessionStorage.getItem(STORE) !== null;

export function forgetKey() {
  sessionStorage.removeItem(STORE);
}

/** A failure that can be shown as it is. `code` is the API's, or "network", "stopped", "key". */
export class Failure extends Error {
  constructor(message, code, status = 0) {
    const text = message.trim();
    super(text.charAt(0).toUpperCase() + text.slice(1) + (/[.!?…]$/.test(text) ? "" : "."));
    this.code = code;
    this.status = status;
  }
}

/** Fetch from the proxy. Asks for a key where one is wanted, and throws Failure for any other error. */
export async function call(path, options = {}) {
  for (;;) {
    const key = sessionStorage.getItem(STORE);
    const headers = { ...options.headers, ...(key === null ? {} : { Authorization: `Bearer ${key}` }) };
    let response;
    try {
      response = await fetch(path, { cache: "no-store", ...options, headers });
    } catch (error) {
      if (error.name === "AbortError") throw new Failure("stopped", "stopped");
      throw new Failure(`the proxy at ${location.host} does not answer: is the cluster still running?`, "network");
    }
    if (response.ok) return response;
    const failure = await refusal(response);
    if (failure.status !== 401) throw failure;
    if (key === sessionStorage.getItem(STORE)) await askForKey(key === null ? "" : failure.message);
  }
}

export const getJson = async (path) => (await call(path)).json();

async function refusal(response) {
  const body = await response.json().catch(() => ({}));
  const { message = `the proxy answered with status ${response.status}`, code = "unknown" } = body.error ?? {};
  const wait = response.headers.get("Retry-After");
  const later = wait && !/try again/.test(message) ? `; try again in ${wait} s` : "";
  return new Failure(message + later, code, response.status);
}

/** One dialog, however many requests wait for the key. Throws Failure("key") where none is given. */
function askForKey(problem) {
  asking ??= new Promise((resolve, reject) => {
    const dialog = find("key-dialog");
    const field = find("key-field");
    find("key-problem").textContent = problem;
    field.value = "";
    dialog.returnValue = "";
    dialog.showModal();
    dialog.addEventListener(
      "close",
      () => {
        asking = null;
        const given = field.value.trim();
        if (dialog.returnValue !== "give" || !given) return reject(new Failure("this server wants an API key", "key"));
        if (/[^\x21-\x7e]/.test(given)) return resolve(); // no header can carry it: asked again
        sessionStorage.setItem(STORE, given);
        document.dispatchEvent(new Event("key"));
        resolve();
      },
      { once: true },
    );
  });
  return asking;
}

/** Yield the events of a stream as objects, until [DONE]. Throws Failure for an error within. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let complete = false;
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done && complete) return; // only now: to leave at [DONE] would break the connection off
      if (done) throw new Failure("the stream ended before the answer did", "network");
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data:")) continue;
        const data = line.slice(5).trim();
        if (data === "[DONE]") complete = true;
        if (complete) continue;
        const event = JSON.parse(data);
        if (event.error) throw new Failure(event.error.message, event.error.code);
        yield event;
      }
    }
  } catch (error) {
    if (error instanceof Failure) throw error;
    if (error.name === "AbortError") throw new Failure("stopped", "stopped");
    throw new Failure("the connection broke within the answer", "network");
  } finally {
    reader.cancel().catch(() => {});
  }
}
