"use strict";
// Draws the figures of this page from the data beside it. Colours come from the style sheet, so light and dark agree.
(function () {
  const data = JSON.parse(document.getElementById("figure-data").textContent);
  const text = JSON.parse(document.getElementById("figure-words").textContent);
  const dashes = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot", "solid", "dash"];
  const isTouch = window.matchMedia("(pointer: coarse)").matches;
  const state = { axis: "update", isLog: false };
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function hours(run, update) {
    const x = run.clock_x, y = run.clock_y;
    let low = 0, high = x.length - 1;
    if (update >= x[high]) return y[high];
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (x[middle] <= update) low = middle; else high = middle;
    }
    const share = x[high] === x[low] ? 0 : (update - x[low]) / (x[high] - x[low]);
    return y[low] + share * (y[high] - y[low]);
  }

  function place(run, updates) {
    if (state.axis === "tokens") return updates.map((update) => update * run.tokens_per_update);
    if (state.axis === "hours") return updates.map((update) => hours(run, update));
    return updates;
  }

  function draw(trace) {
    const index = (trace.colour === undefined ? trace.run : trace.colour) % 8;
    const several = data.runs.length > 1 || trace.colour !== undefined;
    const main = colour("--c" + index);
    const drawn = {
      x: place(data.runs[trace.run], trace.x), y: trace.y, name: trace.name, showlegend: Boolean(trace.legend),
      type: "scatter", mode: "lines", line: { color: main, width: 2, dash: several ? dashes[index] : "solid" },
      hovertemplate: "%{y:.6~g}<extra>%{fullData.name}</extra>",
    };
    if (trace.kind === "raw") {
      drawn.line = { color: main, width: 1 };
      drawn.opacity = data.runs.length > 1 ? 0.22 : 0.38;
      if (data.runs.length > 1) drawn.hoverinfo = "skip", delete drawn.hovertemplate;
    } else if (trace.kind === "past") {
      drawn.line = { color: colour("--past"), width: 1.5, dash: "dot" };
    } else if (trace.kind === "points") {
      drawn.mode = trace.x.length > 40 ? "lines" : "lines+markers";
      drawn.marker = { size: 6, color: main };
    }
    return drawn;
  }

  function layout(figure) {
    const grid = { gridcolor: colour("--grid"), linecolor: colour("--line"), zeroline: false, automargin: true };
    const shapes = figure.band === null ? [] : [{
      type: "rect", xref: "paper", x0: 0, x1: 1, y0: -figure.band, y1: figure.band, line: { width: 0 },
      fillcolor: colour("--past"), opacity: 0.25, layer: "below",
    }];
    if (figure.id === "difference") shapes.push({
      type: "line", xref: "paper", x0: 0, x1: 1, y0: 0, y1: 0, line: { color: colour("--c0"), width: 1.5 },
    });
    const legends = figure.traces.filter((trace) => trace.legend).length;
    const isNarrow = window.innerWidth < 640;
    return {
      height: 340 + (isNarrow && legends > 3 ? 19 * legends : 0), margin: { l: 8, r: 12, t: 8, b: 8 }, hovermode: "x unified", dragmode: isTouch ? false : "zoom",
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", shapes: shapes,
      font: { color: colour("--text"), family: getComputedStyle(document.body).fontFamily, size: 12 },
      hoverlabel: { bgcolor: colour("--card"), bordercolor: colour("--line"), font: { color: colour("--text") }, namelength: 40 },
      xaxis: Object.assign({ title: { text: text["x_" + state.axis], standoff: 6 }, type: state.isLog ? "log" : "linear" }, grid),
      yaxis: Object.assign({ title: { text: figure.y_title, standoff: 6 }, type: figure.is_log ? "log" : "linear" }, grid,
        figure.is_log ? { dtick: 1, exponentformat: "power" } : {},
        figure.y_range && !state.isLog ? { range: figure.y_range } : { autorange: true }),
      showlegend: legends > 0, legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: 12 } },
    };
  }

  function render() {
    for (const figure of data.figures) {
      Plotly.react("figure-" + figure.id, figure.traces.map(draw), layout(figure), {
        responsive: true, displayModeBar: false, doubleClick: "reset+autosize",
      });
    }
  }

  document.querySelectorAll("button[data-axis]").forEach((button) => button.addEventListener("click", () => {
    state.axis = button.dataset.axis;
    document.querySelectorAll("button[data-axis]").forEach((other) =>
      other.setAttribute("aria-pressed", String(other === button)));
    render();
  }));
  const log = document.getElementById("log");
  log.addEventListener("click", () => {
    state.isLog = !state.isLog;
    log.setAttribute("aria-pressed", String(state.isLog));
    render();
  });
  document.addEventListener("themechange", render);
  render();
})();
