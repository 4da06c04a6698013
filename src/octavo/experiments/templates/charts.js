// Figures of `charts.py` with plotly.js, in the reader's colours: drawn again in others when the scheme changes or the
// page is printed. `root.dataset.charts` is the count of drawn charts once all are.
"use strict";
const root = document.documentElement, narrow = 560, drawn = [];

async function unpack(page, id) {
  const bytes = Uint8Array.from(atob(page.getElementById(id).textContent), letter => letter.charCodeAt(0));
  const stream = new DecompressionStream("gzip"), writer = stream.writable.getWriter();
  writer.write(bytes);
  writer.close();
  return new Response(stream.readable).text();
}

async function chartsOf(page) {
  return JSON.parse(await unpack(page, "charts"));
}

// The figure with CSS variables replaced by the values that the page has now.
function coloured(value, style) {
  if (typeof value === "string") return value.startsWith("var(--") ? style.getPropertyValue(value.slice(4, -1)).trim() : value;
  if (Array.isArray(value)) return value.some(each => typeof each !== "number" && each !== null) ? value.map(each => coloured(each, style)) : value;
  if (value === null || typeof value !== "object") return value;
  return Object.fromEntries(Object.entries(value).map(([key, each]) => [key, coloured(each, style)]));
}

// On a narrow page the panels of a heat map lie below each other.
function stacked(layout) {
  const axes = Object.keys(layout).filter(key => key.startsWith("xaxis"));
  const count = axes.length, each = 1 / count, height = Math.max(0.6 * layout.height, 200), gap = 52 / (height * count);
  axes.forEach((key, number) => {
    layout[key].domain = [0, 1];
    layout[key.replace("x", "y")].domain = [1 - (number + 1) * each + gap / 2, 1 - number * each - gap / 2];
    layout[key.replace("x", "y")].showticklabels = true;
  });
  layout.height = height * count;
}

function figure(chart, place) {
  const {data, layout} = coloured({data: chart.data, layout: chart.layout}, getComputedStyle(root));
  if ("xaxis2" in layout && place.clientWidth < narrow) stacked(layout);
  const finger = matchMedia("(pointer: coarse)").matches;
  if (finger) layout.dragmode = false;  // it scrolls the page
  layout.width = place.clientWidth;
  if (chart.logarithmic) Object.assign(layout.yaxis, {type: "log", range: chart.log});
  layout.uirevision = Boolean(chart.logarithmic);  // while it is the same, the reader's zoom stays
  return [data, layout, {
    displaylogo: false, displayModeBar: !finger, modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
    typesetMath: false, showSendToCloud: false, plotlyServerURL: "", toImageButtonOptions: {filename: chart.title, scale: 2},
  }];
}

function draw({chart, place}) {
  return Plotly.react(place, ...figure(chart, place));
}

function drawAll() {
  return Promise.all(drawn.map(draw));
}

// Draw charts in the places of a page; one that was drawn before keeps its zoom and its kind of axis.
async function place(page, charts) {
  const before = new Map(drawn.map(one => [one.chart.title, one]));
  const places = [...page.querySelectorAll(".plot")];
  drawn.splice(0, drawn.length, ...charts.map((chart, number) => {
    const old = before.get(chart.title);
    if (old) places[number].replaceWith(old.place);
    return {chart: {...chart, logarithmic: Boolean(old?.chart.logarithmic && chart.log)}, place: old?.place ?? places[number]};
  }));
  for (const button of page.querySelectorAll("[data-log]")) {
    const one = drawn[button.dataset.log];
    const show = () => button.setAttribute("aria-pressed", one.chart.logarithmic);
    button.addEventListener("click", () => {
      one.chart.logarithmic = !one.chart.logarithmic;
      show();
      draw(one);
    });
    show();
  }
  await drawAll();
  root.dataset.charts = charts.length;
}

function followReader() {
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  let width = root.clientWidth, waiting;
  addEventListener("resize", () => {
    if (width === root.clientWidth) return;
    width = root.clientWidth;
    clearTimeout(waiting);
    waiting = setTimeout(drawAll, 100);
  });
  addEventListener("beforeprint", () => { root.classList.add("paper"); drawAll(); });
  addEventListener("afterprint", () => { root.classList.remove("paper"); drawAll(); });
}
