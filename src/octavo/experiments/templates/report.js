// A report: plotly.js lies on the page, compressed as the charts.
async function start() {
  const [library, charts] = await Promise.all([unpack(document, "plotly"), chartsOf(document)]);
  const element = document.createElement("script");
  element.textContent = library;
  document.head.append(element);
  await place(document, charts);
  followReader();
}

start().catch(error => {
  for (const place of document.querySelectorAll(".plot")) {
    place.textContent = `This chart needs a browser from 2023 or newer, with scripts allowed (${error}). The tables hold the results.`;
  }
  console.error(error);
});
