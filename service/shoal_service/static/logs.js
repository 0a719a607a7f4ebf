// What a job prints, as it comes: while "follow" is on, lines are added from the stream of its log; else the panel loads
// itself anew when something happened. A stream is opened only then: browsers keep few connections to one server.
const MOST_LINES = 1000;
let stream = null;

const part = () => document.getElementById("logs-part");
const box = () => part()?.querySelector(".scroll");

function addCell(row, text, name = "") {
  const cell = row.insertCell();
  if (name) cell.className = name;
  cell.append(text);
  return cell;
}

function add(said) {
  const table = document.getElementById("log-lines");
  if (!table || document.getElementById(`line-${said.line}`)) return;
  table.closest("table").hidden = false;
  document.getElementById("log-empty")?.remove();
  const row = table.insertRow();
  row.id = `line-${said.line}`;
  row.className = `level-${said.level}`;
  const link = document.createElement("a");
  link.href = `?line=${said.line}#line-${said.line}`;
  link.textContent = said.line;
  addCell(row, link, "num");
  const time = document.createElement("time");
  time.dateTime = said.at;
  time.textContent = `${said.at.slice(0, 19).replace("T", " ")} UTC`;
  addCell(row, time);
  const from = addCell(row, [said.rank === null ? "" : `rank ${said.rank}`, said.node ?? ""].join(" ").trim(), "nowrap");
  if (said.level !== "info") {
    const level = document.createElement("b");
    level.textContent = ` ${said.level}`;
    from.append(level);
  }
  addCell(row, said.text, "text");
  while (table.rows.length > MOST_LINES) table.deleteRow(0);
}

function toBottom() {
  const scroll = box();
  if (scroll && part().dataset.next) scroll.scrollTop = scroll.scrollHeight;
}

function follow() {
  const { stream: address, query, next } = part().dataset;
  stream = new EventSource(`${address}?watch=1&cursor=line_${next}${query ? `&${query}` : ""}`);
  stream.addEventListener("line", (event) => {
    const scroll = box();
    const atEnd = scroll && scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 40;
    add(JSON.parse(event.data));
    if (atEnd) toBottom();
  });
  stream.addEventListener("end", stop);
  stream.addEventListener("error", () => stream?.readyState === EventSource.CLOSED && stop());
}

function stop() {
  stream?.close();
  stream = null;
  const box = document.getElementById("logs-follow");
  if (box) box.checked = false;
}

function show() {
  const label = document.getElementById("logs-follow-label");
  if (label && part()?.dataset.next) label.hidden = false;
}

document.addEventListener("change", (event) => {
  if (event.target.id !== "logs-follow") return;
  if (event.target.checked) follow();
  else stop();
});
// Only the newest lines change; and those that somebody follows come by themselves.
document.body.addEventListener("shoal:history", () => {
  if (!stream && part()?.dataset.next) document.body.dispatchEvent(new Event("shoal:logs"));
});
document.body.addEventListener("htmx:afterSettle", (event) => {
  if (event.target.id === "part-logs") stop();
  if (!["part-logs", "logs-part"].includes(event.target.id)) return;
  show();
  toBottom();
});
show();
if (!location.hash.startsWith("#line-")) toBottom();
