// Keeps a page live: a stream tells that something changed, the page is fetched again, and its parts are exchanged.
// Without JavaScript the page is complete, only not live.
const LEAST_PAUSE_MS = 700;

const own = document.querySelector("script[data-stream]");
const light = document.getElementById("live");
const streamUrl = own.dataset.stream;
let refreshing = false;
let stale = false;

function say(text, on) {
  light.textContent = text;
  light.classList.toggle("on", on);
}

function exchange(fresh) {
  for (const part of fresh.querySelectorAll("[data-part]")) {
    const old = document.getElementById(part.id);
    if (!old || old.innerHTML === part.innerHTML) continue;
    for (const details of part.querySelectorAll("details[id]")) {
      details.open = document.getElementById(details.id)?.open ?? false;
    }
    const scrolled = [...old.querySelectorAll(".scroll")].map((box) => [box.scrollLeft, box.scrollTop]);
    old.replaceWith(part);
    part.querySelectorAll(".scroll").forEach((box, index) => {
      if (scrolled[index]) [box.scrollLeft, box.scrollTop] = scrolled[index];
    });
  }
  document.title = fresh.title;
}

async function refresh() {
  stale = true;
  if (refreshing) return;
  refreshing = true;
  while (stale) {
    stale = false;
    try {
      const answer = await fetch(location.href, { headers: { accept: "text/html" } });
      if (answer.ok) exchange(new DOMParser().parseFromString(await answer.text(), "text/html"));
      else say(`the server answered ${answer.status}`, false);
      document.dispatchEvent(new Event("shoal:changed"));
    } catch {
      say("reconnecting", false);
    }
    await new Promise((done) => setTimeout(done, LEAST_PAUSE_MS));
  }
  refreshing = false;
}

const stream = new EventSource(streamUrl);
stream.addEventListener("open", () => say("live", true));
stream.addEventListener("error", () => say("reconnecting", false));
stream.addEventListener("change", refresh);
stream.addEventListener("end", () => {
  stream.close();
  say("ended", false);
  refresh();
});

document.addEventListener("submit", (event) => {
  const question = event.target.dataset.confirm;
  if (question && !confirm(question)) event.preventDefault();
});
