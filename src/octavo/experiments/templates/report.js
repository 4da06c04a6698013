// A report: library and charts lie on the page, compressed. `root.dataset.charts` is the count of drawn charts once all
// are.
async function unpack(id) {
  const bytes = Uint8Array.from(atob(document.getElementById(id).textContent), letter => letter.charCodeAt(0));
  const stream = new DecompressionStream("gzip"), writer = stream.writable.getWriter();
  writer.write(bytes);
  writer.close();
  return new Response(stream.readable).text();
}

async function start() {
  const places = [...document.querySelectorAll(".plot")];
  const [library, list] = await Promise.all([unpack("plotly"), unpack("charts")]);
  const charts = JSON.parse(list), element = document.createElement("script");
  element.textContent = library;
  document.head.append(element);
  drawn.push(...places.map((place, number) => ({chart: charts[number], place})));
  for (const button of document.querySelectorAll("[data-log]")) switchAxis(button, drawn[button.dataset.log]);
  await drawAll();
  followReader();
  root.dataset.charts = places.length;
}

start().catch(error => {
  for (const place of document.querySelectorAll(".plot")) {
    place.textContent = `This chart needs a browser from 2023 or newer, with scripts allowed (${error}). The tables hold the results.`;
  }
  console.error(error);
});
