// Keeps a page live: one stream tells what happened. Panels of a job load themselves anew by htmx; other pages are
// fetched again, and their parts are exchanged. Without JavaScript a page is complete, only not live.
const LEAST_PAUSE_MS = 700;

const own = document.querySelector("script[data-stream]");
const light = document.getElementById("live");
const waits = new Map();

function say(text, on) {
  light.textContent = text;
  light.classList.toggle("on", on);
}

// At most one event of a name in a while, the last one always.
function tell(name) {
  const now = performance.now();
  const wait = waits.get(name) ?? { at: 0, timer: 0 };
  waits.set(name, wait);
  if (wait.timer) return;
  const fire = () => {
    wait.at = performance.now();
    wait.timer = 0;
    document.body.dispatchEvent(new Event(name));
  };
  wait.timer = setTimeout(fire, Math.max(0, LEAST_PAUSE_MS - (now - wait.at)));
}

async function reload() {
  try {
    const answer = await fetch(location.href, { headers: { accept: "text/html" } });
    if (!answer.ok) return say(`the server answered ${answer.status}`, false);
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    for (const part of fresh.querySelectorAll("[data-reload]")) {
      const old = document.getElementById(part.id);
      if (!old || old.innerHTML === part.innerHTML) continue;
      const scrolled = [...old.querySelectorAll(".scroll")].map((box) => [box.scrollLeft, box.scrollTop]);
      old.replaceWith(part);
      part.querySelectorAll(".scroll").forEach((box, index) => {
        if (scrolled[index]) [box.scrollLeft, box.scrollTop] = scrolled[index];
      });
    }
  } catch {
    say("reconnecting", false);
  }
}

if (document.querySelector("[data-reload]")) document.body.addEventListener("shoal:change", reload);

const stream = new EventSource(own.dataset.stream);
stream.addEventListener("open", () => {
  say("live", true);
  document.dispatchEvent(new Event("shoal:opened"));
});
stream.addEventListener("error", () => say("reconnecting", false));
// What a page was drawn with is no news to it, however often the stream is opened.
let version = own.dataset.version;
let mark = own.dataset.mark;
stream.addEventListener("change", (event) => {
  const said = JSON.parse(event.data);
  if (said.version !== undefined && String(said.version) === version) return;
  version = String(said.version);
  tell("shoal:change");
});
stream.addEventListener("history", (event) => {
  const said = JSON.parse(event.data);
  if (said.mark === mark) return;
  mark = said.mark;
  tell("shoal:history");
});
stream.addEventListener("points", (event) => {
  document.dispatchEvent(new CustomEvent("shoal:points", { detail: JSON.parse(event.data) }));
});
stream.addEventListener("end", () => {
  stream.close();
  say("ended", false);
  document.dispatchEvent(new Event("shoal:opened"));
});
