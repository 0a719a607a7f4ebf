// What every page does: light or dark, UTC or local times, how long ago, countdowns, questions before what cannot be
// undone, and keeping what a reader opened when a part of the page is exchanged.
const root = document.documentElement;

function kept(name) {
  try {
    return localStorage.getItem(name);
  } catch {
    return null;
  }
}

function keep(name, value) {
  try {
    localStorage.setItem(name, value);
  } catch {
    // Without storage the choice lasts as long as the page.
  }
}

// --- light, dark, or as the system says ---

const themes = ["system", "light", "dark"];
const themeButton = document.getElementById("theme");

function showTheme() {
  const theme = root.dataset.theme ?? "system";
  themeButton.textContent = { system: "Auto", light: "Light", dark: "Dark" }[theme];
  themeButton.setAttribute("aria-label", `Colours: ${theme}; switch`);
}

themeButton.addEventListener("click", () => {
  const next = themes[(themes.indexOf(root.dataset.theme ?? "system") + 1) % themes.length];
  if (next === "system") delete root.dataset.theme;
  else root.dataset.theme = next;
  keep("shoal-theme", next);
  showTheme();
  document.dispatchEvent(new Event("shoal:theme"));
});
themeButton.hidden = false;
showTheme();

// --- times ---

const clockButton = document.getElementById("clock");
let local = kept("shoal-clock") === "local";

function stamp(moment) {
  if (!local) return `${moment.toISOString().slice(0, 19).replace("T", " ")} UTC`;
  const two = (number) => String(number).padStart(2, "0");
  const day = `${moment.getFullYear()}-${two(moment.getMonth() + 1)}-${two(moment.getDate())}`;
  return `${day} ${two(moment.getHours())}:${two(moment.getMinutes())}:${two(moment.getSeconds())}`;
}

export function spell(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  if (whole < 172800) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}

const put = (element, text) => {
  if (element.textContent !== text) element.textContent = text;
};

function showTimes() {
  const now = Date.now();
  for (const time of document.querySelectorAll("time[datetime]")) {
    const moment = new Date(time.dateTime);
    if (Number.isNaN(moment.getTime())) continue;
    put(time, stamp(moment));
    const title = `${spell((now - moment) / 1000)} ago`;
    if (time.title !== title) time.title = title;
  }
  for (const span of document.querySelectorAll("[data-ago]")) {
    put(span, `, ${spell((now - new Date(span.dataset.ago)) / 1000)} ago`);
  }
  for (const span of document.querySelectorAll("[data-since]")) put(span, spell(now / 1000 - Number(span.dataset.since)));
  for (const span of document.querySelectorAll("[data-until]")) {
    const left = Number(span.dataset.until) - now / 1000;
    put(span, left > 0 ? `in ${spell(left)}` : `overdue for ${spell(-left)}`);
  }
}

clockButton.addEventListener("click", () => {
  local = !local;
  keep("shoal-clock", local ? "local" : "utc");
  showClock();
  showTimes();
});

function showClock() {
  clockButton.textContent = local ? "Local time" : "UTC";
  clockButton.setAttribute("aria-label", `Times: ${local ? "local" : "UTC"}; switch`);
}

clockButton.hidden = false;
showClock();
showTimes();
setInterval(showTimes, 1000);

// --- forms and choices ---

document.addEventListener("submit", (event) => {
  const question = event.target.dataset.confirm;
  if (question && !confirm(question)) event.preventDefault();
});

function showSliders() {
  for (const slider of document.querySelectorAll("input[data-epochs]")) slider.hidden = false;
}

document.addEventListener("change", (event) => {
  const slider = event.target.closest?.("input[data-epochs]");
  if (!slider) return;
  const epoch = slider.dataset.epochs.split(",")[slider.value - 1];
  const query = slider.value === slider.max ? "" : `epoch=${epoch}&`;
  htmx.ajax("GET", `${slider.dataset.panel}?${query}choose=1`, { target: "#part-plan", swap: "outerHTML" });
});
showSliders();

// --- parts that are exchanged ---

const last = new Map();
let held = null;

const fieldsOf = (part) => [...part.querySelectorAll("form[action] input[type=number]")];
const nameOf = (field) => `${field.form.getAttribute("action")} ${field.name}`;

document.addEventListener("htmx:beforeSwap", (event) => {
  const { target, serverResponse: text } = event.detail;
  if (!target.id) return;
  // The same again, or somebody writes in it: leave it as it is.
  const writes = target.contains(document.activeElement) && document.activeElement.matches("input[type=number]");
  if (last.get(target.id) === text || (writes && target.hasAttribute("data-part"))) {
    event.detail.shouldSwap = false;
    return;
  }
  last.set(target.id, text);
  held = {
    open: new Map([...target.querySelectorAll("details[id]")].map((details) => [details.id, details.open])),
    scrolled: [...target.querySelectorAll(".scroll")].map((box) => [box.scrollLeft, box.scrollTop]),
    // What somebody wrote and has not sent yet.
    written: new Map(
      fieldsOf(target)
        .filter((field) => field.value !== field.defaultValue)
        .map((field) => [nameOf(field), field.value]),
    ),
    focus: target.contains(document.activeElement) ? document.activeElement.id : "",
    id: target.id,
  };
});

document.addEventListener("htmx:afterSwap", () => {
  showTimes();
  showSliders();
  if (!held) return;
  const { open, scrolled, written, focus, id } = held;
  held = null;
  for (const [name, was] of open) {
    const details = document.getElementById(name);
    if (details) details.open = was;
  }
  const part = document.getElementById(id);
  part?.querySelectorAll(".scroll").forEach((box, index) => {
    if (scrolled[index]) [box.scrollLeft, box.scrollTop] = scrolled[index];
  });
  for (const field of part ? fieldsOf(part) : []) {
    if (written.has(nameOf(field))) field.value = written.get(nameOf(field));
  }
  if (focus) document.getElementById(focus)?.focus();
});
