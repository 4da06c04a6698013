// Draws the figures of `charts.py` with plotly.js: in the reader's colours, again in others when the scheme changes or
// the page is printed. `root.dataset.charts` is the count of drawn charts once all are.
"use strict";
const root = document.documentElement, narrow = 560;

async function unpack(id) {
  const bytes = Uint8Array.from(atob(document.getElementById(id).textContent), letter => letter.charCodeAt(0));
  const stream = new DecompressionStream("gzip"), writer = stream.writable.getWriter();
  writer.write(bytes);
  writer.close();
  return new Response(stream.readable).text();
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

async function start() {
  const places = [...document.querySelectorAll(".plot")];
  const [library, list] = await Promise.all([unpack("plotly"), unpack("charts")]);
  const charts = JSON.parse(list), element = document.createElement("script");
  element.textContent = library;
  document.head.append(element);
  const draw = number => Plotly.react(places[number], ...figure(charts[number], places[number]));
  const all = () => places.map((_, number) => draw(number));
  for (const button of document.querySelectorAll("[data-log]")) {
    button.addEventListener("click", () => {
      const chart = charts[button.dataset.log];
      chart.logarithmic = !chart.logarithmic;
      button.setAttribute("aria-pressed", chart.logarithmic);
      draw(Number(button.dataset.log));
    });
  }
  await Promise.all(all());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", all);
  let width = root.clientWidth, waiting;
  addEventListener("resize", () => {
    if (width === root.clientWidth) return;
    width = root.clientWidth;
    clearTimeout(waiting);
    waiting = setTimeout(all, 100);
  });
  addEventListener("beforeprint", () => { root.classList.add("paper"); all(); });
  addEventListener("afterprint", () => { root.classList.remove("paper"); all(); });
  root.dataset.charts = places.length;
}

start().catch(error => {
  for (const place of document.querySelectorAll(".plot")) {
    place.textContent = `This chart needs a browser from 2023 or newer, with scripts allowed (${error}). The tables hold the results.`;
  }
  console.error(error);
});
