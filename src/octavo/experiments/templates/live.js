// The live page: asks for the data of the run and shows what has changed. `root.dataset.drawn` counts the times.
const PERIOD = 2000, STALLED = 60;
const byId = id => document.getElementById(id);
const byTitle = new Map();  // what is drawn, by the title of its chart
let data = {}, text = "", skew = 0, connected = false, chosen = null;

function element(kind, content = "", name = "") {
  const made = document.createElement(kind);
  made.textContent = content;
  if (name) made.className = name;
  return made;
}

function duration(seconds) {
  const whole = Math.max(0, Math.round(seconds)), hours = Math.floor(whole / 3600), minutes = Math.floor(whole / 60) % 60;
  if (hours >= 48) return `${Math.floor(hours / 24)} days ${hours % 24} h`;
  if (hours) return `${hours} h ${String(minutes).padStart(2, "0")} min`;
  return minutes ? `${minutes} min ${String(whole % 60).padStart(2, "0")} s` : `${whole} s`;
}

function fact(place, label, value) {
  byId(place).replaceChildren(...(value ? [label, " ", element("b", value)] : []));
}

// The state and the times, once a second.
function tick() {
  const now = (Date.now() + skew) / 1000, training = data.state === "training";
  const silent = training ? now - (data.last ?? data.started ?? now) : 0;
  const stalled = silent > Math.max(STALLED, 10 * (data.seconds_per_step ?? 0));
  const state = connected ? data.state ?? "no data" : "lost";
  byId("state").className = `state ${stalled ? "killed" : state}`;
  byId("state").lastChild.textContent = !connected ? "octavo watch has ended" : stalled ? `no step for ${duration(silent)}` : state;
  const notice = data.error ?? (connected ? data.text : "");
  byId("notice").hidden = !notice;
  byId("notice").classList.toggle("warn", Boolean(data.error) || state === "killed" || state === "failed");
  byId("notice").firstChild.textContent = notice ?? "";
  byId("progress").hidden = !data.steps;
  if (!data.steps) return;
  fact("steps", "step", `${data.step.toLocaleString("en")} of ${data.steps.toLocaleString("en")}`);
  const until = training ? now : data.last ?? data.started;
  fact("elapsed", "elapsed", data.started && until ? duration(until - data.started) : "");
  const left = (data.steps - data.step) * (data.seconds_per_step ?? NaN) - Math.min(silent, data.seconds_per_step ?? 0);
  fact("left", "left", training && data.step < data.steps && Number.isFinite(left) ? duration(left) : "");
  byId("bar").style.width = `${100 * data.step / data.steps}%`;
  document.title = `${Math.floor(100 * data.step / data.steps)} % · ${data.title} · Octavo`;
}

function showTiles() {
  byId("tiles").replaceChildren(...(data.tiles ?? []).map(({value, label}) => {
    const tile = element("div", "", "tile");
    tile.append(element("b", value), element("span", label));
    return tile;
  }));
}

// The place of a chart: a card with its title, and a button where its axis may be logarithmic; heat maps share a card.
function place(chart, size) {
  const map = size === "maps", card = element(map ? "div" : "section", "", map ? "" : "card");
  const figure = element("figure"), caption = element("figcaption"), plot = element("div", "", "plot"), keys = element("div");
  const one = {chart, place: plot, size, card, keys};
  caption.append(element(map ? "h3" : "h2", chart.title));
  if (chart.log) {
    const button = element("button", "log");
    button.type = "button";
    button.title = "Switch between a linear and a logarithmic axis";
    button.setAttribute("aria-pressed", "false");
    switchAxis(button, one);
    caption.append(button);
  }
  plot.setAttribute("role", "img");
  plot.setAttribute("aria-label", `${chart.title}, ${chart.unit}`);
  plot.style.minHeight = `${chart.layout.height}px`;
  figure.append(caption, ...(chart.caption ? [element("p", chart.caption, "caption")] : []), plot, keys);
  card.append(figure);
  return one;
}

// The legends of a heat map, whose levels may move with the values.
function showKeys({chart, keys}) {
  keys.replaceChildren(...chart.keys.map(([title, entries]) => {
    const line = element("p", "", "keys");
    if (title) line.append(element("span", title, "muted"));
    line.append(...entries.map(({colour, text}) => {
      const entry = element("span"), swatch = element("i");
      swatch.style.background = colour;
      entry.append(swatch, text);
      return entry;
    }));
    return line;
  }));
}

async function showCharts() {
  for (const size of ["large", "small", "maps"]) {
    const shown = (data.charts?.[size] ?? []).map(chart => {
      chart.layout.uirevision = "live";  // keeps the reader's zoom
      const one = byTitle.get(chart.title) ?? place(chart, size);
      one.chart = {...chart, logarithmic: one.chart.logarithmic && chart.log};
      byTitle.set(chart.title, one);
      showKeys(one);
      return one;
    });
    const cards = shown.map(one => one.card);
    if (cards.some((card, number) => byId(size).children[number] !== card) || byId(size).children.length !== cards.length) byId(size).replaceChildren(...cards);
    drawn.splice(0, drawn.length, ...drawn.filter(one => one.size !== size), ...shown);
  }
  byId("operands").hidden = !data.charts?.maps?.length;
  await drawAll();
}

function showTable(id, rows, cell = value => element("td", value)) {
  byId(id).hidden = !rows.length;
  byId(id).querySelector("tbody").replaceChildren(...rows.map(values => {
    const row = element("tr");
    row.append(...values.map(cell));
    return row;
  }));
}

function showEvents() {
  const events = data.events ?? [], more = (data.events_in_all ?? 0) - events.length;
  showTable("events", events.map(each => [String(each.step), each.event, each.text.replace(`step ${each.step}: `, "")]), (value, column) => {
    const cell = element("td", column === 1 ? "" : value);
    if (column === 1) cell.append(element("span", value.replace("_", " "), value));
    return cell;
  });
  byId("events").querySelector("p").textContent = more > 0 ? `And ${more} before them, in events.jsonl.` : "";
}

function showSamples() {
  const samples = data.samples ?? [], select = byId("samples").querySelector("select");
  byId("samples").hidden = !samples.length;
  const steps = samples.map(each => String(each.step));
  if (steps.join() !== [...select.options].map(option => option.value).join()) {
    select.replaceChildren(...steps.map(step => new Option(`step ${Number(step).toLocaleString("en")}`, step)));
  }
  select.value = steps.includes(chosen) ? chosen : steps[0] ?? "";
  const texts = samples.find(each => String(each.step) === select.value)?.texts ?? [];
  byId("samples").querySelector("div").replaceChildren(...texts.map(({prompt, text}) => {
    const made = element("pre", "", "sample");
    made.append(element("b", prompt), text);
    return made;
  }));
}

async function show() {
  byId("title").textContent = data.title ?? "";
  byId("subtitle").textContent = data.subtitle ?? "";
  byId("folder").textContent = data.folder ?? "";
  tick();
  showTiles();
  await showCharts();
  showSamples();
  showEvents();
  showTable("numbers", data.rows ?? []);
  showTable("layers", data.layers ?? []);
  byId("layers").querySelector("p").textContent = data.converted ?? "";
  byId("config").hidden = !data.config;
  byId("config").querySelector("pre").textContent = data.config ?? "";
  root.dataset.drawn = Number(root.dataset.drawn ?? 0) + 1;
}

async function poll() {
  const start = performance.now();
  try {
    const response = await fetch("/data.json"), received = await response.text();
    skew = Date.parse(response.headers.get("Date")) - Date.now();
    connected = true;
    if (received !== text) {
      text = received;
      const content = JSON.parse(received);
      data = content.error ? {...data, error: content.error} : content;
      await show();
    }
  } catch (error) {
    if (connected) console.error(error);
    connected = false;
  }
  tick();
  // A long run takes longer to read and to draw: it is asked less often.
  setTimeout(next, Math.max(PERIOD, 10 * (performance.now() - start)));
}

function next() {
  if (byId("pause").getAttribute("aria-pressed") === "true" || document.hidden) setTimeout(next, 250);
  else poll();
}

byId("pause").addEventListener("click", () => {
  const paused = byId("pause").getAttribute("aria-pressed") === "true";
  byId("pause").setAttribute("aria-pressed", String(!paused));
});
byId("samples").querySelector("select").addEventListener("change", event => { chosen = event.target.value; showSamples(); });
followReader();
setInterval(tick, 1000);
poll();
