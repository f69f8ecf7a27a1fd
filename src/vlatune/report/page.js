// Interaction of a page: charts show values and zoom, and commands can be copied.
//
// chart.py has drawn the curves: without this script the page is complete but static. Zooming moves the SVG's view box over the
// curves and redraws the axes. A chart's values are in its `data-chart`; text is always set as text, never as markup.
// Numbers and ticks equal those of formatting.py and chart.py, which the browser tests check.
"use strict";
(() => {
  const LEAST_WIDTH = 0.5; // smallest zoom, in percent of the x axis
  const NEAR = 0.02; // part of the view within which a line's point belongs to the pointer
  const DRAG_PX = 6; // shorter drags are clicks

  // Numbers, as in formatting.py.

  const plain = (text) => text.replace(/(\.\d*?)0+(?=e|$)/, "$1").replace(/\.(?=e|$)/, "");
  const grouped = (value) => Math.round(value).toLocaleString("en-US");

  function number(value, digits = 4) {
    const size = Math.abs(value);
    if (size >= 1e9) return plain(value.toExponential(digits - 1)).replace(/e\+(\d)$/, "e$1");
    if (size >= 1000) return grouped(value);
    return size !== 0 && size < 1e-4 ? plain(value.toExponential(digits - 1)) : String(Number(value.toPrecision(digits)));
  }

  // Ticks, as in chart.py.

  const ten = (power) => Number(`1e${power}`); // 10 ** -4 is not 0.0001 in every browser

  function linearTicks(low, high, count, integers) {
    const top = Math.floor(Math.log10(high - low)) + 1;
    let ticks = [];
    for (let power = top; power > top - 4; power--) {
      for (const factor of [5, 2, 1]) {
        const step = factor * ten(power);
        if (integers && step < 1 && ticks.length) return ticks;
        const first = Math.ceil(low / step - 1e-9), last = Math.floor(high / step + 1e-9);
        ticks = Array.from({ length: Math.max(0, last - first + 1) }, (_, index) => (first + index) * step);
        if (ticks.length >= count) return ticks;
      }
    }
    return ticks;
  }

  function logTicks(low, high) {
    const factors = Math.log10(high / low) > 3 ? [1] : [1, 2, 5];
    const ticks = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
      for (const factor of factors) {
        const tick = factor * ten(power);
        if (low <= tick && tick <= high) ticks.push(tick);
      }
    }
    return ticks;
  }

  // One axis: values onto 0..100 and back.

  function makeAxis([low, high], log) {
    const bend = log ? Math.log10 : (value) => value;
    const unbend = log ? (value) => 10 ** value : (value) => value;
    const [begin, end] = [bend(low), bend(high)];
    return {
      place: (value) => (100 * (bend(value) - begin)) / (end - begin),
      value: (at) => unbend(begin + (at / 100) * (end - begin)),
    };
  }

  function make(name, parent, className, text = "") {
    const made = parent.appendChild(document.createElement(name));
    made.className = className;
    made.textContent = text;
    return made;
  }

  function addInteraction(figure) {
    const chart = JSON.parse(figure.dataset.chart);
    const plot = figure.querySelector(".plot"), svg = plot.querySelector("svg"), cap = plot.querySelector(".cap");
    const axes = { x: makeAxis(chart.x, false), y: makeAxis(chart.y, chart.log) };
    const [factor, suffix] = chart.format, write = (value) => number(value * factor) + suffix;
    const capTop = cap && parseFloat(cap.style.top);
    const lines = [];
    for (const line of chart.lines) lines.push({ ...line, xs: line.xs ?? lines.at(-1).xs });
    const longest = lines.reduce((most, line) => (line.xs.length > most.xs.length ? line : most));
    const all = { x: [0, 100], y: [0, 100] };
    let view = all, dragFrom = null, pointed = null;

    const inView = (at) => (100 * (at - view.x[0])) / (view.x[1] - view.x[0]);
    const fromView = (share) => view.x[0] + share * (view.x[1] - view.x[0]);

    function writeAxes() {
      for (const old of plot.querySelectorAll(":scope > .x, :scope > .y, svg > .grid")) old.remove();
      const [left, right] = view.x.map(axes.x.value), [low, high] = view.y.map(axes.y.value);
      for (const tick of linearTicks(left, right, chart.ticks[0], true)) {
        make("span", plot, "x", grouped(tick)).style.left = `${inView(axes.x.place(tick)).toFixed(2)}%`;
      }
      const yTicks = chart.log && high / low > 10 ? logTicks(low, high) : linearTicks(low, high, chart.ticks[1], false);
      for (const tick of yTicks) {
        const at = axes.y.place(tick);
        const top = (100 * (view.y[1] - at)) / (view.y[1] - view.y[0]);
        make("span", plot, "y", write(tick)).style.top = `${top.toFixed(2)}%`;
        const mark = document.createElementNS(svg.namespaceURI, "path");
        mark.setAttribute("d", `M0 ${100 - at}H100`);
        mark.setAttribute("class", "grid");
        svg.prepend(mark);
      }
      if (cap) {
        const top = (100 * (view.y[1] - (100 - capTop))) / (view.y[1] - view.y[0]);
        cap.style.top = `${top}%`;
        cap.hidden = top < 0 || top > 100;
      }
    }

    function show(next) {
      view = next;
      svg.setAttribute("viewBox", `${view.x[0]} ${100 - view.y[1]} ${view.x[1] - view.x[0]} ${view.y[1] - view.y[0]}`);
      figure.classList.toggle("zoomed", view !== all);
      writeAxes();
      hideReadout();
    }

    // Show from..to of the x axis, with the y axis fitted to the lines there.
    function zoom(from, to) {
      const width = Math.max(to - from, LEAST_WIDTH);
      const begin = Math.min(Math.max(0, (from + to - width) / 2), Math.max(0, 100 - width));
      if (width >= 100) return show(all);
      const seen = [];
      for (const line of lines) {
        line.xs.forEach((x, place) => {
          const at = axes.x.place(x);
          if (line.ys[place] !== null && at >= begin && at <= begin + width) seen.push(axes.y.place(line.ys[place]));
        });
      }
      if (!seen.length) return show({ x: [begin, begin + width], y: [0, 100] });
      const low = Math.min(...seen), high = Math.max(...seen), air = Math.max(0.06 * (high - low), 0.5);
      show({ x: [begin, begin + width], y: [low - air, high + air] });
    }

    function zoomBy(factor) {
      const centre = pointed === null ? (view.x[0] + view.x[1]) / 2 : axes.x.place(longest.xs[pointed]);
      const half = ((view.x[1] - view.x[0]) * factor) / 2;
      zoom(centre - half, centre + half);
    }

    // Values at the pointer.

    const cross = make("div", plot, "cross"), band = make("div", plot, "band"), box = make("div", plot, "readout");
    for (const part of [cross, band, box]) part.hidden = true;
    box.setAttribute("role", "status");

    function hideReadout() {
      cross.hidden = box.hidden = band.hidden = true;
    }

    const nearest = (line, at) =>
      line.xs.reduce((best, x, place) => {
        const distance = Math.abs(axes.x.place(x) - at);
        return line.ys[place] !== null && distance < best.distance ? { place, distance } : best;
      }, { place: null, distance: Infinity });

    function showReadout(place) {
      const at = axes.x.place(longest.xs[place]), left = inView(at);
      if (left < -0.01 || left > 100.01) return hideReadout();
      pointed = place;
      cross.style.left = `${left}%`;
      box.replaceChildren();
      make("b", box, "", `${chart.xName} ${number(longest.xs[place], 6)}`);
      for (const line of lines) {
        const found = nearest(line, at);
        if (found.distance > NEAR * (view.x[1] - view.x[0])) continue;
        const row = make("span", box, "key");
        make("i", row, line.style);
        make("span", row, "", `${line.name} ${write(line.ys[found.place])}`);
      }
      cross.hidden = box.hidden = false;
      const bounds = plot.getBoundingClientRect(), size = box.offsetWidth, x = (left / 100) * bounds.width;
      const beside = x + 12 + size + bounds.left < document.documentElement.clientWidth ? x + 12 : x - 12 - size;
      box.style.left = `${Math.max(beside, 4 - bounds.left)}px`;
    }

    function showReadoutAt(event) {
      const found = nearest(longest, fromView(pointerShare(event)));
      if (found.place !== null) showReadout(found.place);
    }

    function pointerShare(event) {
      const bounds = plot.getBoundingClientRect();
      return Math.min(Math.max((event.clientX - bounds.left) / bounds.width, 0), 1);
    }

    function drawBand(event) {
      const ends = [dragFrom, pointerShare(event)].sort((a, b) => a - b);
      band.hidden = false;
      band.style.left = `${100 * ends[0]}%`;
      band.style.width = `${100 * (ends[1] - ends[0])}%`;
      return ends;
    }

    // A mouse zooms by dragging over a range; a finger moves the readout, and zooms with the buttons.

    plot.addEventListener("pointerdown", (event) => {
      if (event.pointerType === "mouse" && event.button === 0) {
        dragFrom = pointerShare(event);
        plot.setPointerCapture(event.pointerId);
        event.preventDefault();
        plot.focus({ preventScroll: true });
      } else showReadoutAt(event);
    });
    plot.addEventListener("pointermove", (event) => {
      showReadoutAt(event);
      if (dragFrom !== null) drawBand(event);
    });
    plot.addEventListener("pointerup", (event) => {
      if (dragFrom === null) return;
      const ends = drawBand(event), from = dragFrom;
      dragFrom = null;
      band.hidden = true;
      if (Math.abs(pointerShare(event) - from) * plot.clientWidth >= DRAG_PX) zoom(fromView(ends[0]), fromView(ends[1]));
    });
    plot.addEventListener("pointercancel", () => { dragFrom = null; hideReadout(); });
    plot.addEventListener("pointerleave", (event) => {
      if (event.pointerType === "mouse" && dragFrom === null) hideReadout();
    });
    plot.addEventListener("dblclick", () => show(all));
    plot.tabIndex = 0;
    plot.addEventListener("keydown", (event) => {
      const stride = { ArrowLeft: -1, ArrowRight: 1 }[event.key], last = longest.xs.length - 1;
      if (stride) showReadout(Math.min(Math.max((pointed ?? (stride > 0 ? -1 : last + 1)) + stride, 0), last));
      else if (event.key === "+") zoomBy(0.5);
      else if (event.key === "-") zoomBy(2);
      else if (event.key === "Escape") show(all);
      else return;
      event.preventDefault();
    });
    plot.addEventListener("blur", hideReadout);

    const buttons = make("span", figure.querySelector("figcaption"), "zoom");
    const controls = [
      ["all", "show all", () => show(all)],
      ["−", "zoom out", () => zoomBy(2)],
      ["+", "zoom in", () => zoomBy(0.5)],
    ];
    for (const [text, name, act] of controls) {
      const button = make("button", buttons, name.replace(" ", "-"), text);
      button.type = "button";
      button.title = name;
      button.setAttribute("aria-label", `${name}: ${chart.title}`);
      button.addEventListener("click", act);
    }
  }

  // Without a secure context (a page over plain http) there is no clipboard API: copy a selection.
  async function copy(text, element) {
    if (navigator.clipboard) {
      try {
        return await navigator.clipboard.writeText(text);
      } catch { /* not permitted: try the selection */ }
    }
    getSelection().selectAllChildren(element);
    if (!document.execCommand("copy")) throw new Error("copying is not supported");
  }

  function makeCopyable(command) {
    const button = document.createElement("button");
    command.before(button);
    button.type = "button";
    button.className = "copy";
    button.textContent = "Copy";
    button.addEventListener("click", async () => {
      try {
        await copy(command.textContent, command);
        button.textContent = "Copied";
      } catch {
        button.textContent = "Select it and press Ctrl-C";
      }
      setTimeout(() => { button.textContent = "Copy"; }, 2000);
    });
  }

  document.querySelectorAll("figure.chart").forEach(addInteraction);
  document.querySelectorAll("pre.command").forEach(makeCopyable);
})();
