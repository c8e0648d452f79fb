"use strict";
// Draws the figures, lets a reader choose what their horizontal axis shows, and sorts tables.
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const waiting = new Set(figures.keys()); // to be drawn
  const axis = { gridcolor: "#e3e8ed", zeroline: false, ticks: "" };
  // A finger that goes over a figure scrolls the page; its buttons zoom.
  const coarse = matchMedia("(pointer: coarse)").matches;
  const base = {
    autosize: true,
    font: { family: "system-ui, -apple-system, Segoe UI, Roboto, Arial, sans-serif", size: 13 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    margin: { l: 10, r: 16, t: 12, b: 40 },
    legend: { orientation: "h", x: 0, y: 1.01, xanchor: "left", yanchor: "bottom" },
    hoverlabel: { namelength: -1 },
    // Else plotly takes half of black behind it, as the page behind is transparent.
    modebar: { bgcolor: "rgba(0,0,0,0)" },
    dragmode: coarse ? false : "zoom",
  };
  const config = {
    responsive: true,
    displaylogo: false,
    modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
  };

  function layoutOf(figure) {
    const layout = { ...base, ...figure.layout };
    for (const name of Object.keys(layout).filter((key) => /^[xy]axis/.test(key))) {
      // Labels make room across their axis. Along it they would come and go with the room they take.
      const automargin = name[0] === "x" ? "height" : "width";
      layout[name] = { ...axis, automargin, ...layout[name] };
    }
    layout.legend = { ...base.legend, ...figure.layout.legend };
    return layout;
  }

  async function draw(number) {
    const place = document.getElementById(`figure-${number}`);
    const figure = figures[number];
    await Plotly.newPlot(place, figure.traces, layoutOf(figure), config);
    await makeRoom(place);
    shape(place);
    place.on("plotly_afterplot", () => shape(place));
  }

  // A legend gets half of a figure at most, and scrolls: on a phone the figure becomes higher.
  async function makeRoom(place) {
    const { height, legend } = place._fullLayout;
    if (!legend || !(legend._height > height / 2)) return;
    const more = Math.ceil(Math.max(height / 2, legend._height + 30) + legend._height);
    place.style.height = `${more}px`;
    await Plotly.relayout(place, { height: more });
  }

  // So that a printer may scale what was drawn for a screen.
  function shape(place) {
    const { width, height } = place._fullLayout;
    place.style.setProperty("--shape", `${width} / ${height}`);
    for (const svg of place.querySelectorAll(".main-svg")) {
      svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    }
  }

  function choose(button) {
    const { figure, choice } = button.dataset;
    if (waiting.has(Number(figure))) return;
    const chosen = figures[figure].choices[choice];
    const title = { "xaxis.title.text": chosen.title, "xaxis.autorange": true };
    Plotly.update(`figure-${figure}`, { x: chosen.values }, title);
    for (const other of button.parentElement.children) {
      other.setAttribute("aria-pressed", String(other === button));
    }
  }

  function keyOf(row, column) {
    const cell = row.cells[column];
    if (!cell.classList.contains("number")) return cell.textContent;
    return cell.dataset.value === "" ? null : Number(cell.dataset.value);
  }

  // What is not known stands last, however the others are sorted.
  function compare(a, b, sign) {
    if (a === null || b === null) return (a === null) - (b === null);
    if (typeof a === "number" && typeof b === "number") return sign * (a - b);
    return sign * String(a).localeCompare(String(b), undefined, { numeric: true });
  }

  function sort(button) {
    const head = button.closest("th");
    const body = button.closest("table").tBodies[0];
    const column = head.cellIndex;
    const ascending = head.getAttribute("aria-sort") !== "ascending";
    for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", ascending ? "ascending" : "descending");
    const rows = [...body.rows].map((row) => [keyOf(row, column), row]);
    rows.sort(([a], [b]) => compare(a, b, ascending ? 1 : -1));
    body.append(...rows.map(([, row]) => row));
  }

  for (const table of document.querySelectorAll("table")) {
    const first = table.tBodies[0].rows[0];
    if (!first) continue;
    [...first.cells].forEach((cell, column) => {
      const head = table.tHead.rows[0].cells[column];
      head.classList.toggle("number", cell.classList.contains("number"));
    });
  }
  for (const button of document.querySelectorAll("th button")) {
    button.addEventListener("click", () => sort(button));
  }
  for (const button of document.querySelectorAll(".choices button")) {
    button.addEventListener("click", () => choose(button));
  }
  // On paper nothing can be opened, and nothing is drawn later.
  const folded = document.querySelectorAll("details.long:not([open])");
  addEventListener("beforeprint", () => {
    folded.forEach((one) => { one.open = true; });
    waiting.forEach((number) => draw(number));
    waiting.clear();
  });
  addEventListener("afterprint", () => folded.forEach((one) => { one.open = false; }));

  // What a reader sees comes first, wherever that is by now; between figures the page can scroll.
  const root = document.documentElement;
  const pause = () => new Promise((go) => { setTimeout(go); });

  function inView(number) {
    const { top, bottom } = document.getElementById(`figure-${number}`).getBoundingClientRect();
    return top < innerHeight && bottom > 0;
  }

  (async () => {
    while (waiting.size > 0) {
      const seen = [...waiting].find(inView);
      if (seen === undefined) root.dataset.seen = "";
      const [next] = seen === undefined ? waiting : [seen];
      waiting.delete(next);
      await draw(next);
      await pause();
    }
    root.dataset.seen = "";
    root.dataset.height = String(root.scrollHeight);
    root.dataset.drawn = String(figures.length);
  })();
})();
