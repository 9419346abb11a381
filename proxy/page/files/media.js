// Pictures, recordings and video on their way into a request.
import { KINDS } from "./dom.js";

export const MAX_BYTES = 64 * 2 ** 20; // of one item, between the processes of a cluster
const WAV_RATE = 16000;
const ENDINGS = {
  image: ["png", "jpg", "jpeg", "gif", "bmp", "webp", "avif", "tif", "tiff"],
  audio: ["wav", "mp3", "mpga", "flac", "ogg", "opus", "m4a", "aac", "oga"],
  video: ["mp4", "webm", "mov", "mkv", "avi", "mpeg"],
};

const ending = (name) => name.toLowerCase().split(".").at(-1);

/** Return "image", "audio" or "video"; null for any other file. */
export function kindOf(file) {
  const kind = file.type.split("/")[0];
  if (kind in ENDINGS) return kind;
  return Object.keys(ENDINGS).find((each) => ENDINGS[each].includes(ending(file.name))) ?? null;
}

/** Read a file into {kind, name, url, size}; `url` is a data: URL. Throws an Error with a sentence. */
export async function readFile(file, takes) {
  let kind = kindOf(file);
  if (kind === null) throw new Error(`${file.name} is neither a picture nor audio nor video.`);
  if (kind === "video" && !takes.includes("video") && takes.includes("audio")) kind = "audio"; // its sound alone
  if (!takes.includes(kind)) throw new Error(`${file.name} is not taken: ${refusalOf(kind, takes)}`);
  if (file.size > MAX_BYTES) throw new Error(`${file.name} is larger than ${MAX_BYTES / 2 ** 20} MiB, the most that one item may have.`);
  return { kind, name: file.name, size: file.size, url: await dataUrl(file), preview: URL.createObjectURL(file) };
}

export function refusalOf(kind, takes) {
  const has = takes.map((each) => KINDS[each]).join(" and ") || "text only";
  return `this model takes ${has}, ${KINDS[kind]} ${kind === "image" ? "need" : "needs"} another one.`;
}

function dataUrl(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result.replace(/^data:(;|,)/, "data:application/octet-stream$1"));
    reader.onerror = () => reject(new Error("The file cannot be read."));
    reader.readAsDataURL(blob);
  });
}

/** Decode what the browser can play, and return a WAV of one channel, 16 kHz, 16 bits: every server takes that. */
export async function toWav(blob) {
  const decoder = new OfflineAudioContext(1, 1, WAV_RATE); // decodes to its own rate
  const sound = await decoder.decodeAudioData(await blob.arrayBuffer());
  const channels = Array.from({ length: sound.numberOfChannels }, (_, index) => sound.getChannelData(index));
  const view = new DataView(new ArrayBuffer(44 + 2 * sound.length));
  const text = (at, word) => [...word].forEach((letter, index) => view.setUint8(at + index, letter.charCodeAt(0)));
  text(0, "RIFF");
  view.setUint32(4, 36 + 2 * sound.length, true);
  text(8, "WAVEfmt ");
  view.setUint32(16, 16, true);
  view.setUint16(20, 1, true); // PCM
  view.setUint16(22, 1, true);
  view.setUint32(24, WAV_RATE, true);
  view.setUint32(28, 2 * WAV_RATE, true);
  view.setUint16(32, 2, true);
  view.setUint16(34, 16, true);
  text(36, "data");
  view.setUint32(40, 2 * sound.length, true);
  for (let index = 0; index < sound.length; index++) {
    const mean = channels.reduce((sum, channel) => sum + channel[index], 0) / channels.length;
    view.setInt16(44 + 2 * index, Math.round(32767 * Math.max(-1, Math.min(1, mean))), true);
  }
  return new Blob([view], { type: "audio/wav" });
}

/** Why there is no microphone; null where there may be one. */
export function noMicrophone() {
  if (!window.isSecureContext) return "browsers give a microphone to https and localhost only.";
  return navigator.mediaDevices && window.MediaRecorder ? null : "this browser cannot record.";
}

/** Begin to record; returns a function that ends the recording and returns it as a File: WAV where it can be decoded. */
export async function record() {
  const stream = await navigator.mediaDevices.getUserMedia({ audio: true }).catch((error) => {
    const denied = error.name === "NotAllowedError";
    throw new Error(denied ? "The browser was not allowed to use the microphone." : "No microphone was found.");
  });
  const recorder = new MediaRecorder(stream);
  const pieces = [];
  recorder.ondataavailable = (event) => pieces.push(event.data);
  const ended = new Promise((resolve) => (recorder.onstop = resolve));
  recorder.start();
  return async () => {
    if (recorder.state !== "inactive") recorder.stop();
    await ended;
    stream.getTracks().forEach((track) => track.stop());
    const type = recorder.mimeType || "audio/webm";
    const sound = new File(pieces, `recording.${type.includes("mp4") ? "m4a" : "webm"}`, { type });
    return toWav(sound).then((wav) => new File([wav], "recording.wav", { type: wav.type }), () => sound);
  };
}
