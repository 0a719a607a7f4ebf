// Draws a job's curves: the branch that counts, rolled-back points pale, evaluations, and marks where something
// happened. Asks for the curve when the stream opens, and adds the points that the stream brings. A stretch that is
// chosen, by dragging or by its steps, is asked for anew, since more of its points fit. A point that is clicked, and each
// row of the table, leads to what is told of its step.
const box = document.getElementById("curve");
const table = document.querySelector("#curve-table tbody");
const details = document.getElementById("curve-details");
const figure = document.getElementById("curve-figure");
const over = document.getElementById("curve-over");
const logarithmic = document.getElementById("curve-log");
const fromStep = document.getElementById("curve-from");
const toStep = document.getElementById("curve-to");
const whole = document.getElementById("curve-whole");
const pointed = document.getElementById("curve-step");
const dark = matchMedia("(prefers-color-scheme: dark)");
const HEIGHT = 280;
const MOST_POINTS = 4000; // kept in the page; beyond that the server makes fewer of them
const url = `/v1/jobs/${box.dataset.job}/metrics`;
const tokensPerStep = Number(box.dataset.tokensPerStep) || 1;
let plot = null;
let metrics = null;
let painting = 0;
let asking = 0; // the newest question's number: an older one's answer may come later

document.getElementById("curve-controls").hidden = false;

// A canvas knows no light-dark(), so an element is asked what a colour comes to.
const probe = document.createElement("span");
probe.hidden = true;
document.body.append(probe);
function colour(name) {
  probe.style.color = `var(${name})`;
  return getComputedStyle(probe).color;
}

const xOf = {
  step: (point) => point.step,
  at: (point) => Date.parse(point.at) / 1000,
  tokens: (point) => point.step * tokensPerStep,
};

// uPlot wants one ascending x for all series, so all of them share the union of theirs.
function columns() {
  const x = xOf[over.value];
  const name = figure.value;
  const evaluations = name === "loss" ? metrics.evaluations : [];
  if (name === "mfu") withMfu([...metrics.points, ...metrics.rolled_back]);
  const all = [...metrics.points, ...metrics.rolled_back, ...evaluations].map(x);
  const places = [...new Set(all)].sort((a, b) => a - b);
  const index = new Map(places.map((place, number) => [place, number]));
  const column = (points, key) => {
    const values = Array(places.length).fill(null);
    for (const point of points) {
      const value = point[key];
      values[index.get(x(point))] = value == null || (logarithmic.checked && value <= 0) ? null : value;
    }
    return values;
  };
  return [places, column(metrics.rolled_back, name), column(metrics.points, name), column(evaluations, "loss")];
}

// By epoch, which share of the peak of its devices one token per second is.
// As the server writes them: also of what is next to nothing.
const inPercent = (share) => (share == null ? "-" : `${share < 0.1 ? Number((100 * share).toPrecision(2)) : (100 * share).toFixed(0)} %`);

const mfuPerRate = () => JSON.parse(document.getElementById("curve-marks")?.dataset.mfu ?? "{}");

function withMfu(points) {
  const rates = mfuPerRate();
  for (const point of points) point.mfu = point.tokens_per_s == null || !rates[point.epoch] ? null : point.tokens_per_s * rates[point.epoch];
}

const marks = () => JSON.parse(document.getElementById("curve-marks")?.dataset.marks ?? "[]");

// The step that was newest at a moment; null if that lies outside of the stretch that is chosen.
function stepAt(at) {
  const moment = Date.parse(at);
  let found = null;
  for (const point of metrics.points) if (Date.parse(point.at) <= moment) found = point;
  if (toStep.value !== "" && found === metrics.points.at(-1)) return null;
  return found?.step ?? (fromStep.value === "" ? metrics.points[0]?.step ?? 0 : null);
}

function place(mark) {
  if (over.value === "at") return Date.parse(mark.at) / 1000;
  const step = mark.step ?? stepAt(mark.at);
  if (step === null) return null;
  return over.value === "tokens" ? step * tokensPerStep : step;
}

function drawMarks(chart) {
  const { ctx, bbox } = chart;
  const ratio = devicePixelRatio;
  const colours = { recovery: colour("--mark"), notice: colour("--notice"), checkpoint: colour("--checkpoint") };
  ctx.save();
  ctx.lineWidth = ratio;
  ctx.font = `bold ${11 * ratio}px sans-serif`;
  for (const mark of marks()) {
    const where = place(mark);
    if (where === null) continue;
    const x = chart.valToPos(where, "x", true);
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    ctx.strokeStyle = ctx.fillStyle = colours[mark.kind];
    ctx.beginPath();
    if (mark.kind === "checkpoint") {
      ctx.setLineDash([]);
      ctx.lineWidth = 3 * ratio;
      ctx.moveTo(x, bbox.top + bbox.height);
      ctx.lineTo(x, bbox.top + bbox.height - 8 * ratio);
    } else {
      ctx.lineWidth = ratio;
      ctx.setLineDash(mark.kind === "notice" ? [ratio, 3 * ratio] : [4 * ratio, 3 * ratio]);
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
    }
    ctx.stroke();
    ctx.textAlign = x > bbox.left + bbox.width - 30 * ratio ? "right" : "left";
    const beside = ctx.textAlign === "right" ? -4 : 4;
    if (mark.label) ctx.fillText(mark.label, x + beside * ratio, bbox.top + (mark.kind === "notice" ? 24 : 11) * ratio);
  }
  ctx.restore();
}

function short(value) {
  if (value == null) return "-";
  const size = Math.abs(value);
  if (size >= 1e4) return value.toLocaleString("en", { maximumFractionDigits: 0 });
  return size >= 0.01 || size === 0 ? value.toFixed(4) : value.toExponential(2);
}

function build() {
  const name = figure.selectedOptions[0].textContent;
  const axis = { stroke: colour("--soft"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false } };
  const shown = (_, value) => short(value);
  const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 4 });
  const whole = [1, 2, 5].flatMap((digit) => [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11].map((power) => digit * 10 ** power));
  const xAxis = { ...axis, label: over.selectedOptions[0].textContent, labelSize: 20, size: 34 };
  if (over.value !== "at") xAxis.incrs = whole.sort((a, b) => a - b);
  if (over.value === "tokens") xAxis.values = (_, values) => values.map((value) => compact.format(value));
  const yValues = (_, values) => values.map((value) => (value == null ? "" : Math.abs(value) >= 1e4 ? compact.format(value) : Math.abs(value) < 0.001 && value !== 0 ? value.toExponential(1) : Number(value.toPrecision(6))));
  document.getElementById("curve-name").textContent = name;
  box.setAttribute("aria-label", `${name} by ${xAxis.label}; the same figures are in the table below`);
  box.replaceChildren();
  plot = new uPlot(
    {
      width: box.clientWidth,
      height: HEIGHT,
      scales: { x: { time: over.value === "at" }, y: { distr: logarithmic.checked ? 3 : 1 } },
      cursor: { drag: { x: true, y: false, setScale: false } },
      axes: [xAxis, { ...axis, size: 62, values: yValues }],
      series: [
        { label: over.value === "at" ? "time" : over.value, value: over.value === "at" ? undefined : (_, value) => (value == null ? "-" : value.toLocaleString("en")) },
        { label: "rolled back", stroke: colour("--undone"), width: 2, points: { show: true, size: 9 }, value: shown },
        { label: name, stroke: colour("--loss"), width: 2, spanGaps: true, value: shown },
        { label: "evaluation", stroke: colour("--evaluation"), width: 2, spanGaps: true, value: shown, points: { show: true, size: 6 } },
      ],
      hooks: { draw: [drawMarks], setSelect: [dragged], ready: [(chart) => chart.over.addEventListener("click", () => point(chart))] },
    },
    columns(),
    box,
  );
}

// The steps at the ends of what was dragged over; none where no point lies there.
function stepsOf(low, high) {
  const x = xOf[over.value];
  const within = [...metrics.points, ...metrics.rolled_back].filter((point) => low <= x(point) && x(point) <= high);
  const steps = within.map((point) => point.step);
  return steps.length ? [Math.min(...steps), Math.max(...steps)] : null;
}

function dragged(chart) {
  const { left, width } = chart.select;
  if (width <= 0) return;
  const steps = stepsOf(chart.posToVal(left, "x"), chart.posToVal(left + width, "x"));
  chart.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
  if (steps) choose(...steps);
}

const linkOf = (step) => `?step=${step}#part-step`;

// Names the point next to where was clicked.
function point(chart) {
  const x = xOf[over.value];
  const place = chart.posToVal(chart.cursor.left, "x");
  const far = (each) => Math.abs(x(each) - place);
  const [nearest] = [...metrics.points, ...metrics.rolled_back].sort((a, b) => far(a) - far(b));
  if (!nearest) return;
  const link = pointed.querySelector("a");
  link.href = linkOf(nearest.step);
  link.textContent = `Step ${nearest.step.toLocaleString("en")}, attempt ${nearest.epoch}, ${figure.selectedOptions[0].textContent} ${short(nearest[figure.value])}: more of it`;
  pointed.hidden = false;
}

function choose(from, to) {
  fromStep.value = from;
  toStep.value = to;
  stretch();
}

// Either end may be open.
function stretch() {
  const bad = fromStep.value !== "" && toStep.value !== "" && Number(toStep.value) < Number(fromStep.value);
  toStep.setCustomValidity(bad ? `the last step is below the first, ${fromStep.value}` : "");
  if (!fromStep.reportValidity() || !toStep.reportValidity()) return;
  whole.hidden = fromStep.value === "" && toStep.value === "";
  load();
}

function fillTable() {
  if (!details.open || !metrics) return;
  const rows = [
    ...metrics.points.map((point) => ({ ...point, counts: "yes" })),
    ...metrics.rolled_back.map((point) => ({ ...point, counts: "rolled back" })),
  ].sort((a, b) => b.step - a.step || b.epoch - a.epoch);
  withMfu(rows);
  const evaluations = new Map(metrics.evaluations.map((found) => [found.step, found.loss]));
  table.replaceChildren(
    ...rows.map((point) => {
      const row = document.createElement("tr");
      const loss = (point.loss == null ? "not a number" : point.loss.toFixed(4)) + (point.skipped ? ", skipped" : "");
      const speed = point.tokens_per_s == null ? "-" : Math.round(point.tokens_per_s).toLocaleString("en");
      const evaluated = evaluations.get(point.step)?.toFixed(4) ?? "";
      [point.step, point.epoch, loss, evaluated, short(point.grad_norm), short(point.lr), speed, inPercent(point.mfu)].forEach((value) => {
        const cell = row.insertCell();
        cell.className = "num";
        cell.textContent = value;
      });
      const link = document.createElement("a");
      link.href = linkOf(point.step);
      link.textContent = point.step;
      row.cells[0].replaceChildren(link);
      row.insertCell().textContent = point.counts;
      return row;
    }),
  );
}

function paint() {
  painting = 0;
  if (!metrics) return;
  if (plot) plot.setData(columns());
  else build();
  const found = marks();
  box.dataset.points = metrics.num_points;
  box.dataset.evaluations = metrics.evaluations.length;
  box.dataset.markers = found.filter((mark) => mark.kind === "recovery").length;
  fillTable();
}

function soon() {
  painting ||= requestAnimationFrame(paint);
}

async function load() {
  const asked = new URLSearchParams();
  if (fromStep.value !== "") asked.set("from_step", fromStep.value);
  if (toStep.value !== "") asked.set("to_step", toStep.value);
  const number = ++asking;
  const answer = await fetch(`${url}?${asked}`);
  if (!answer.ok || number !== asking) return;
  metrics = await answer.json();
  soon();
}

// A step that is done again turns the points from it on into rolled-back ones, as it does in the database.
function add({ points, more }) {
  if (!metrics) return;
  if (more || metrics.points.length + points.length > MOST_POINTS) return load();
  for (const point of points) {
    if (toStep.value !== "" && point.step > Number(toStep.value)) continue;
    const known = metrics.points.at(-1);
    if (known && known.step === point.step && known.epoch === point.epoch) continue;
    if (metrics.rolled_back.some((old) => old.step === point.step && old.epoch === point.epoch)) continue;
    if (known && point.step <= known.step) {
      if (point.epoch <= known.epoch) continue;
      metrics.rolled_back.push(...metrics.points.filter((old) => old.step >= point.step));
      metrics.points = metrics.points.filter((old) => old.step < point.step);
    }
    if (point.step < Number(fromStep.value)) continue;
    metrics.points.push(point);
    metrics.num_points = Math.max(metrics.num_points, metrics.points.length);
  }
  soon();
}

details.addEventListener("toggle", fillTable);
for (const control of [figure, over, logarithmic]) control.addEventListener("change", () => metrics && build());
for (const end of [fromStep, toStep]) end.addEventListener("change", stretch);
whole.addEventListener("click", () => choose("", ""));
box.addEventListener("dblclick", () => choose("", ""));
dark.addEventListener("change", () => metrics && build());
document.addEventListener("shoal:theme", () => metrics && build());
new ResizeObserver(() => plot?.setSize({ width: box.clientWidth, height: HEIGHT })).observe(box);
document.addEventListener("shoal:opened", load);
document.addEventListener("shoal:points", (event) => add(event.detail));
document.body.addEventListener("shoal:history", load);
document.addEventListener("htmx:afterSwap", soon);
load();
