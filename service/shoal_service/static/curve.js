// Draws the loss curve of a job: the branch that counts, rolled-back points pale, evaluations, a vertical line at each
// change of plan.
const box = document.getElementById("curve");
const table = document.querySelector("#curve-table tbody");
const details = document.getElementById("curve-details");
const dark = matchMedia("(prefers-color-scheme: dark)");
const url = `/v1/jobs/${box.dataset.job}/metrics?max_points=1500`;
let plot = null;
let metrics = null;

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// uPlot wants one ascending x for all series, so all of them share the union of their steps.
function columns({ points, rolled_back: undone, evaluations }) {
  const all = [...points, ...undone, ...evaluations];
  const steps = [...new Set(all.map((point) => point.step))].sort((a, b) => a - b);
  const place = new Map(steps.map((step, index) => [step, index]));
  const live = Array(steps.length).fill(null);
  const pale = Array(steps.length).fill(null);
  const evaluated = Array(steps.length).fill(null);
  for (const point of points) live[place.get(point.step)] = point.loss;
  for (const point of undone) pale[place.get(point.step)] = point.loss;
  for (const point of evaluations) evaluated[place.get(point.step)] = point.loss;
  return [steps, pale, live, evaluated];
}

function drawMarkers(chart) {
  const { ctx, bbox } = chart;
  ctx.save();
  ctx.strokeStyle = ctx.fillStyle = colour("--mark");
  ctx.lineWidth = devicePixelRatio;
  ctx.font = `bold ${11 * devicePixelRatio}px sans-serif`;
  metrics.markers.forEach((marker, index) => {
    const x = chart.valToPos(marker.step, "x", true);
    if (x < bbox.left || x > bbox.left + bbox.width) return;
    ctx.setLineDash([4 * devicePixelRatio, 3 * devicePixelRatio]);
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    ctx.fillText(`R${index + 1}`, x + 4 * devicePixelRatio, bbox.top + 11 * devicePixelRatio);
  });
  ctx.restore();
}

function build(data) {
  const axis = { stroke: colour("--soft"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false } };
  const shown = (_, value) => (value == null ? "-" : value.toFixed(4));
  box.replaceChildren();
  plot = new uPlot(
    {
      width: box.clientWidth,
      height: 270,
      scales: { x: { time: false } },
      cursor: { drag: { x: true, y: false } },
      axes: [{ ...axis, label: "step", labelSize: 20, size: 34 }, { ...axis, size: 56 }],
      series: [
        { label: "step" },
        { label: "rolled back", stroke: colour("--undone"), width: 2, points: { show: true, size: 9 }, value: shown },
        { label: "loss", stroke: colour("--loss"), width: 2, spanGaps: true, value: shown },
        {
          label: "evaluation", stroke: colour("--evaluation"), width: 2, spanGaps: true, value: shown,
          points: { show: true, size: 6 },
        },
      ],
      hooks: { draw: [drawMarkers] },
    },
    data,
    box,
  );
}

function fillTable() {
  if (!details.open || !metrics) return;
  const rows = [
    ...metrics.points.map((point) => ({ ...point, counts: "yes" })),
    ...metrics.rolled_back.map((point) => ({ ...point, counts: "rolled back" })),
  ].sort((a, b) => b.step - a.step || b.epoch - a.epoch);
  const evaluations = new Map(metrics.evaluations.map((found) => [found.step, found.loss]));
  table.replaceChildren(
    ...rows.map((point) => {
      const row = document.createElement("tr");
      const speed = point.tokens_per_s == null ? "-" : Math.round(point.tokens_per_s).toLocaleString("en");
      const loss = (point.loss == null ? "not a number" : point.loss.toFixed(4)) + (point.skipped ? ", skipped" : "");
      const evaluated = evaluations.get(point.step)?.toFixed(4) ?? "";
      [point.step, point.epoch, loss, evaluated, speed].forEach((value) => {
        const cell = row.insertCell();
        cell.className = "num";
        cell.textContent = value;
      });
      row.insertCell().textContent = point.counts;
      return row;
    }),
  );
}

async function load() {
  const answer = await fetch(url);
  if (!answer.ok) return;
  metrics = await answer.json();
  const data = columns(metrics);
  if (plot) plot.setData(data);
  else build(data);
  box.dataset.points = metrics.num_points;
  box.dataset.evaluations = metrics.evaluations.length;
  box.dataset.markers = metrics.markers.length;
  fillTable();
}

details.addEventListener("toggle", fillTable);
dark.addEventListener("change", () => metrics && build(columns(metrics)));
new ResizeObserver(() => plot?.setSize({ width: box.clientWidth, height: 270 })).observe(box);
document.addEventListener("shoal:changed", load);
load();
