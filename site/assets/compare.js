"use strict";
// Comparison of any two results. The choice is kept in the address, so a comparison can be linked to.
(function () {
  const data = JSON.parse(document.getElementById("compare-data").textContent);
  const first = document.getElementById("first"), second = document.getElementById("second");
  if (!first || data.entries.length < 2) return;
  const w = data.words;
  const fill = (text, values) => text.replace(/\{(\w+)\}/g, (whole, name) => values[name]);
  const signed = (value, digits) => (value < 0 ? "\u2212" : "+") + Math.abs(value).toFixed(digits);
  const whole = (value) => Math.round(value).toLocaleString("en");

  function cell(row, text, kind) {
    const made = document.createElement(kind || "td");
    made.textContent = text;
    if (kind === "th") made.scope = row.parentElement && row.parentElement.tagName === "THEAD" ? "col" : "row";
    row.appendChild(made);
    return made;
  }

  function table(heads, rows) {
    const made = document.createElement("table");
    const top = made.createTHead().insertRow();
    heads.forEach((text) => cell(top, text, "th"));
    const body = made.createTBody();
    rows.forEach((texts) => {
      const row = body.insertRow();
      texts.forEach((text, index) => {
        const made = cell(row, typeof text === "string" ? text : "", index === 0 ? "th" : "td");
        if (typeof text !== "string") made.appendChild(text);
      });
    });
    return made;
  }

  function deltaBar(difference, largest) {
    const space = "http://www.w3.org/2000/svg";
    const svg = document.createElementNS(space, "svg");
    svg.setAttribute("class", "delta"); svg.setAttribute("viewBox", "0 0 160 12"); svg.setAttribute("aria-hidden", "true");
    const length = 78 * Math.abs(difference) / largest;
    const bar = document.createElementNS(space, "rect");
    const parts = { x: difference < 0 ? 80 - length : 80, y: 1, width: length, height: 10, rx: 2, fill: difference < 0 ? "var(--c1)" : "var(--c0)" };
    for (const [key, value] of Object.entries(parts)) bar.setAttribute(key, value);
    const middle = document.createElementNS(space, "rect");
    for (const [key, value] of Object.entries({ x: 79.5, y: 0, width: 1, height: 12, fill: "var(--soft)" })) middle.setAttribute(key, value);
    svg.append(bar, middle);
    return svg;
  }

  function figures(a, b) {
    const rows = [];
    const add = (label, key, digits, band) => {
      const x = a[key], y = b[key];
      const show = (value) => value === null ? "\u2013" : digits === 0 ? whole(value) : value.toFixed(digits);
      let difference = "\u2013";
      if (x !== null && y !== null) {
        difference = digits === 0 ? (x ? signed(100 * (y / x - 1), 2) + " %" : "\u2013") : signed(y - x, digits);
        if (band && Math.abs(y - x) < band) difference += ` (${w.tie})`;
      }
      rows.push([label, show(x), show(y), difference]);
    };
    add("BPB", "bpb", 4, data.bpb_band);
    add("CORE x 100", "core", 2, data.core_band);
    add("core_v2 x 100", "core_v2", 2, data.core_band);
    add(w.parameters, "parameters", 0);
    add(w.flops, "flops", 0);
    add(w.speed, "speed", 0);
    return table([w.quantity, a.name, b.name, w.compare_difference], rows);
  }

  function tasks(a, b) {
    const other = new Map(b.tasks);
    const both = a.tasks.filter(([label, value]) => value !== null && other.get(label) !== undefined && other.get(label) !== null);
    if (both.length === 0) return null;
    const largest = Math.max(0.01, ...both.map(([label, value]) => Math.abs(other.get(label) - value)));
    const percent = (value) => (100 * value).toFixed(1) + " %";
    const rows = both.map(([label, value]) => {
      const difference = other.get(label) - value;
      return [label, percent(value), percent(other.get(label)), signed(100 * difference, 1), deltaBar(difference, largest)];
    });
    return table([w.task, a.name, b.name, w.compare_difference, ""], rows);
  }

  function verdict(a, b) {
    if (a === b) return w.verdict_same;
    const difference = Math.abs(a.bpb - b.bpb);
    const text = difference.toFixed(4);
    if (difference < data.bpb_band) return fill(w.verdict_tie, { first: a.name, second: b.name, difference: text });
    const [better, worse] = a.bpb < b.bpb ? [a, b] : [b, a];
    return fill(w.verdict_better, { better: better.name, worse: worse.name, difference: text });
  }

  function chart(section, title, note, content) {
    section.replaceChildren();
    section.hidden = content.lines.every((line) => line.points.length === 0);
    if (section.hidden) return;
    const head = document.createElement("h3");
    head.textContent = title;
    section.append(head);
    NextTransformerCharts.draw(section, content);
    if (note) {
      const text = document.createElement("p");
      text.className = "soft";
      text.textContent = note;
      section.append(text);
    }
  }

  function render() {
    const a = data.entries.find((entry) => entry.id === first.value);
    const b = data.entries.find((entry) => entry.id === second.value);
    document.getElementById("verdict").textContent = verdict(a, b);
    document.getElementById("figures").replaceChildren(figures(a, b));
    chart(document.getElementById("curve"), w.curve, "", {
      lines: [{ name: a.name, colour: 0, points: a.curve }, { name: b.name, colour: 1, points: b.curve }],
      x: w.updates, y: w.bpb_unit, digits: 4,
    });
    const base = new Map(a.curve);
    const points = b.curve.filter(([x]) => base.has(x)).map(([x, y]) => [x, y - base.get(x)]);
    chart(document.getElementById("difference"), w.curve_difference, w.band_note, {
      lines: [{ name: `${b.name} \u2212 ${a.name}`, colour: 1, points }],
      x: w.updates, y: w.bpb_unit, digits: 5, band: data.bpb_band,
    });
    const area = document.getElementById("tasks");
    area.replaceChildren();
    const made = tasks(a, b);
    if (made) {
      const head = document.createElement("h2");
      head.textContent = w.tasks;
      const box = document.createElement("div");
      box.className = "card scroll";
      box.tabIndex = 0;
      box.append(made);
      area.append(head, box);
    }
    history.replaceState(null, "", `#a=${encodeURIComponent(a.id)}&b=${encodeURIComponent(b.id)}`);
  }

  for (const select of [first, second]) {
    data.entries.forEach((entry) => select.add(new Option(entry.name, entry.id)));
    select.addEventListener("change", render);
  }
  const asked = new URLSearchParams(location.hash.slice(1));
  const known = (id, fallback) => data.entries.some((entry) => entry.id === id) ? id : fallback;
  first.value = known(asked.get("a"), data.first);
  second.value = known(asked.get("b"), data.second);
  render();
  window.addEventListener("resize", render);
})();
