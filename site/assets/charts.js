"use strict";
// Small line charts in SVG: axes, a band around zero, a cursor that reads values out. No library.
const NextTransformerCharts = (function () {
  const space = "http://www.w3.org/2000/svg";
  const dashes = ["", "7 4", "2 3", "8 3 2 3", "11 4", "11 3 2 3", "", "7 4"];

  function make(parent, name, attributes, text) {
    const element = document.createElementNS(space, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== undefined) element.textContent = text;
    parent.appendChild(element);
    return element;
  }

  function ticks(low, high, count) {
    const rough = (high - low) / count;
    const power = Math.pow(10, Math.floor(Math.log10(rough)));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= rough * 0.999);
    const values = [];
    for (let index = Math.ceil(low / step - 1e-9); index * step <= high + 1e-9 * step; index++) values.push(index * step);
    return values;
  }

  const show = (value) => Number(value.toPrecision(6)).toLocaleString("en", { maximumFractionDigits: 6 });

  // chart: {lines: [{name, colour, points: [[x, y], ...]}], x, y, digits, band}
  function draw(section, chart) {
    section.querySelectorAll("svg.chart, .legend, .readout").forEach((old) => old.remove());
    const lines = chart.lines.filter((line) => line.points.length > 0);
    if (lines.length === 0) return;
    const legend = document.createElement("div");
    legend.className = "legend";
    lines.forEach((line) => {
      const item = document.createElement("span");
      const mark = make(item, "svg", { width: 30, height: 10, viewBox: "0 0 30 10", "aria-hidden": "true" });
      mark.style.marginRight = "6px";
      make(mark, "path", { d: "M1 5H29", stroke: `var(--c${line.colour % 8})`, "stroke-width": 2.4, "stroke-dasharray": dashes[line.colour % 8], fill: "none" });
      item.appendChild(document.createTextNode(line.name));
      legend.appendChild(item);
    });
    const width = Math.max(280, section.clientWidth - 36), height = 300;
    const xs = lines.flatMap((line) => line.points.map((point) => point[0]));
    let ys = lines.flatMap((line) => line.points.map((point) => point[1]));
    if (chart.band) ys = ys.concat([-chart.band, chart.band]);
    const xLow = Math.min(...xs), xHigh = Math.max(...xs) > xLow ? Math.max(...xs) : xLow + 1;
    let yLow = Math.min(...ys), yHigh = Math.max(...ys);
    const margin = 0.06 * (yHigh - yLow) || 0.01 * Math.abs(yHigh) || 1;
    yLow -= margin; yHigh += margin;
    const yTicks = ticks(yLow, yHigh, 6);
    const left = 34 + 7 * Math.max(...yTicks.map((y) => show(y).length)), right = 10, top = 12, bottom = 44;
    const placeX = (x) => left + (x - xLow) / (xHigh - xLow) * (width - left - right);
    const placeY = (y) => top + (yHigh - y) / (yHigh - yLow) * (height - top - bottom);
    const label = lines.map((line) => line.name).join(", ");
    const svg = document.createElementNS(space, "svg");
    svg.setAttribute("class", "chart"); svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("role", "img"); svg.setAttribute("aria-label", `${chart.y}: ${label}`);
    if (chart.band) make(svg, "rect", { class: "band", x: left, width: width - left - right, y: placeY(chart.band), height: placeY(-chart.band) - placeY(chart.band) });
    for (const y of yTicks) {
      make(svg, "line", { class: "grid", x1: left, x2: width - right, y1: placeY(y), y2: placeY(y) });
      make(svg, "text", { x: left - 8, y: placeY(y) + 4, "text-anchor": "end" }, show(y));
    }
    for (const x of ticks(xLow, xHigh, width < 420 ? 4 : 7)) {
      make(svg, "text", { x: placeX(x), y: height - bottom + 18, "text-anchor": "middle" }, show(x));
    }
    make(svg, "line", { class: "axis", x1: left, x2: width - right, y1: height - bottom, y2: height - bottom });
    make(svg, "text", { x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle" }, chart.x);
    make(svg, "text", { transform: `translate(12 ${(top + height - bottom) / 2}) rotate(-90)`, "text-anchor": "middle" }, chart.y);
    lines.forEach((line) => {
      const path = line.points.map((point) => `${placeX(point[0]).toFixed(1)} ${placeY(point[1]).toFixed(1)}`).join("L");
      make(svg, "path", { d: "M" + path, stroke: `var(--c${line.colour % 8})`, "stroke-dasharray": dashes[line.colour % 8] });
      if (line.points.length < 20) line.points.forEach((point) =>
        make(svg, "circle", { cx: placeX(point[0]), cy: placeY(point[1]), r: 3, fill: `var(--c${line.colour % 8})` }));
    });
    const cursor = make(svg, "line", { class: "cursor", y1: top, y2: height - bottom, visibility: "hidden" });
    const readout = document.createElement("div");
    readout.className = "readout soft";
    const all = Array.from(new Set(xs)).sort((a, b) => a - b);
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const at = xLow + ((event.clientX - box.left) / box.width * width - left) / (width - left - right) * (xHigh - xLow);
      const x = all.reduce((best, each) => Math.abs(each - at) < Math.abs(best - at) ? each : best, all[0]);
      cursor.setAttribute("x1", placeX(x)); cursor.setAttribute("x2", placeX(x)); cursor.setAttribute("visibility", "visible");
      const values = lines.map((line) => {
        const point = line.points.find((each) => each[0] === x);
        return point ? `${line.name} ${point[1].toFixed(chart.digits)}` : null;
      }).filter(Boolean);
      readout.textContent = `${show(x)} ${chart.x}: ${values.join("; ")}`;
    });
    svg.addEventListener("pointerleave", () => { cursor.setAttribute("visibility", "hidden"); readout.textContent = ""; });
    section.append(legend, svg, readout);
  }

  return { draw };
})();
