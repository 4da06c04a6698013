// Figures of `charts.py` with plotly.js, in the reader's colours: drawn again in others when the scheme changes or the
// page is printed.
"use strict";
const root = document.documentElement, narrow = 560, drawn = [];

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
  for (const trace of data.filter(trace => trace.type === "heatmap")) {
    trace.hovertext = trace.customdata.map((cells, row) => cells.map(cell =>
      cell && `${trace.meta.rows[row][cell[2]]}<br>${trace.name}: <b>${cell[1]}</b> at ${trace.meta.across} ${cell[0].toLocaleString("en")}`));
    delete trace.customdata;
  }
  if ("xaxis2" in layout && place.clientWidth < narrow) stacked(layout);
  const finger = matchMedia("(pointer: coarse)").matches;
  if (finger) layout.dragmode = false;  // it scrolls the page
  layout.width = place.clientWidth;
  if (chart.logarithmic) Object.assign(layout.yaxis, {type: "log", range: chart.log});
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

// `one` has the chart, which may be another one by the time of the click, and its place.
function switchAxis(button, one) {
  button.addEventListener("click", () => {
    one.chart.logarithmic = !one.chart.logarithmic;
    button.setAttribute("aria-pressed", one.chart.logarithmic);
    draw(one);
  });
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
