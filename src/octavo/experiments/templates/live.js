// The page of a run that goes on: asks for it again, and replaces what is shown if it has changed.
const PERIOD = 2000;
let stamp = "";

async function replacePage(text) {
  const page = new DOMParser().parseFromString(text, "text/html"), main = page.querySelector("main");
  const charts = await chartsOf(page);
  const open = new Set([...document.querySelectorAll("details[open] > summary")].map(summary => summary.textContent));
  for (const summary of main.querySelectorAll("summary")) summary.parentNode.open = open.has(summary.textContent);
  document.title = page.title;
  document.querySelector("main").replaceWith(main);
  await place(main, charts);
}

async function update() {
  const response = await fetch("/", {headers: {"If-None-Match": stamp}}).catch(() => null);
  if (!response) {
    stamp = "";  // another server may come
    Object.assign(document.querySelector(".state"), {textContent: "octavo watch has ended", className: "state warn"});
  } else if (response.ok) {
    await replacePage(await response.text());
    stamp = response.headers.get("ETag");
  }
}

async function follow() {
  const start = performance.now();
  try {
    if (!document.hidden) await update();
  } finally {  // also after a page that could not be drawn
    // A long run takes longer to read and to draw: it is asked less often.
    setTimeout(follow, Math.max(PERIOD, 10 * (performance.now() - start)));
  }
}

followReader();
follow();
