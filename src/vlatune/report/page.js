// What the page does under a hand: charts read out their values and zoom, and a command can be copied.
//
// chart.py has drawn the curves already: without this script the page is whole, only still. Zooming moves the SVG's window over
// them and writes the axes anew. A chart's figures are in its `data-chart`; all text is set as text, never as markup.
// Numbers and ticks are written as formatting.py and chart.py write them; tests/report/test_browser.py holds both together.
"use strict";
(() => {
  const LEAST_WIDTH = 0.5; // of the x axis, in hundredths: a chart has at most 600 points
  const NEAR = 0.02; // of what is seen: a line without a point this near to the pointer has nothing to say there
  const DRAG_PX = 6; // less is a click

  // Numbers, as in formatting.py.

  const plain = (text) => text.replace(/(\.\d*?)0+(?=e|$)/, "$1").replace(/\.(?=e|$)/, "");
  const grouped = (value) => Math.round(value).toLocaleString("en-US");

  function number(value, digits = 4) {
    const size = Math.abs(value);
    if (size >= 1e9) return plain(value.toExponential(digits - 1)).replace(/e\+(\d)$/, "e$1");
    if (size >= 1000) return grouped(value);
    return size !== 0 && size < 1e-4 ? plain(value.toExponential(digits - 1)) : String(Number(value.toPrecision(digits)));
  }

  function bytes(value) {
    if (value < 1000) return `${Math.round(value)} byte${Math.round(value) === 1 ? "" : "s"}`;
    for (const unit of ["kB", "MB", "GB", "TB"]) {
      value /= 1000;
      if (value < 999.5 || unit === "TB") return `${value >= 99.95 ? Math.round(value) : Number(value.toPrecision(3))} ${unit}`;
    }
  }

  function share(value) {
    const percent = 100 * value;
    if (percent > 0 && percent < 0.05) return "under 0.1 %";
    return percent === 0 || percent >= 9.95 ? `${percent.toFixed(0)} %` : `${percent.toFixed(1)} %`;
  }

  const formats = { number, bytes, share };

  // Ticks, as in chart.py.

  const ten = (power) => Number(`1e${power}`); // 10 ** -4 is not 0.0001 in every browser

  function linearTicks(low, high, count, whole) {
    const top = Math.floor(Math.log10(high - low)) + 1;
    let ticks = [];
    for (let power = top; power > top - 4; power--) {
      for (const factor of [5, 2, 1]) {
        const step = factor * ten(power);
        if (whole && step < 1 && ticks.length) return ticks;
        const first = Math.ceil(low / step - 1e-9), last = Math.floor(high / step + 1e-9);
        ticks = Array.from({ length: Math.max(0, last - first + 1) }, (_, place) => (first + place) * step);
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

  function enliven(figure) {
    const chart = JSON.parse(figure.dataset.chart);
    const plot = figure.querySelector(".plot"), svg = plot.querySelector("svg"), cap = plot.querySelector(".cap");
    const axes = { x: makeAxis(chart.x, false), y: makeAxis(chart.y, chart.log) };
    const write = formats[chart.unit], capTop = cap && parseFloat(cap.style.top);
    const lines = [];
    for (const line of chart.lines) lines.push({ ...line, xs: line.xs ?? lines.at(-1).xs });
    const longest = lines.reduce((most, line) => (line.xs.length > most.xs.length ? line : most));
    const whole = { x: [0, 100], y: [0, 100] };
    let view = whole, dragFrom = null, pointed = null;

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
      figure.classList.toggle("zoomed", view !== whole);
      writeAxes();
      quiet();
    }

    // The part from..to of the x axis, and of the y axis what the lines need there.
    function zoom(from, to) {
      const width = Math.max(to - from, LEAST_WIDTH);
      const begin = Math.min(Math.max(0, (from + to - width) / 2), Math.max(0, 100 - width));
      if (width >= 100) return show(whole);
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

    // The read-out.

    const cross = make("div", plot, "cross"), band = make("div", plot, "band"), box = make("div", plot, "readout");
    for (const part of [cross, band, box]) part.hidden = true;
    box.setAttribute("role", "status");

    function quiet() {
      cross.hidden = box.hidden = band.hidden = true;
    }

    const nearest = (line, at) =>
      line.xs.reduce((best, x, place) => {
        const gone = Math.abs(axes.x.place(x) - at);
        return line.ys[place] !== null && gone < best.gone ? { place, gone } : best;
      }, { place: null, gone: Infinity });

    function readOut(place) {
      const at = axes.x.place(longest.xs[place]), left = inView(at);
      if (left < -0.01 || left > 100.01) return quiet();
      pointed = place;
      cross.style.left = `${left}%`;
      box.replaceChildren();
      make("b", box, "", `${chart.xName} ${number(longest.xs[place], 6)}`);
      for (const line of lines) {
        const found = nearest(line, at);
        if (found.gone > NEAR * (view.x[1] - view.x[0])) continue;
        const row = make("span", box, "key");
        make("i", row, line.style);
        make("span", row, "", `${line.name} ${write(line.ys[found.place])}`);
      }
      cross.hidden = box.hidden = false;
      const room = plot.getBoundingClientRect(), size = box.offsetWidth, x = (left / 100) * room.width;
      const beside = x + 12 + size + room.left < document.documentElement.clientWidth ? x + 12 : x - 12 - size;
      box.style.left = `${Math.max(beside, 4 - room.left)}px`;
    }

    function readOutAt(event) {
      const found = nearest(longest, fromView(pointerShare(event)));
      if (found.place !== null) readOut(found.place);
    }

    function pointerShare(event) {
      const room = plot.getBoundingClientRect();
      return Math.min(Math.max((event.clientX - room.left) / room.width, 0), 1);
    }

    function drawBand(event) {
      const ends = [dragFrom, pointerShare(event)].sort((a, b) => a - b);
      band.hidden = false;
      band.style.left = `${100 * ends[0]}%`;
      band.style.width = `${100 * (ends[1] - ends[0])}%`;
      return ends;
    }

    // Hands: a mouse drags over what it wants to see nearer; a finger moves the read-out, and zooms by the buttons around it.

    plot.addEventListener("pointerdown", (event) => {
      if (event.pointerType === "mouse" && event.button === 0) {
        dragFrom = pointerShare(event);
        plot.setPointerCapture(event.pointerId);
        event.preventDefault();
        plot.focus({ preventScroll: true });
      } else readOutAt(event);
    });
    plot.addEventListener("pointermove", (event) => {
      readOutAt(event);
      if (dragFrom !== null) drawBand(event);
    });
    plot.addEventListener("pointerup", (event) => {
      if (dragFrom === null) return;
      const ends = drawBand(event), from = dragFrom;
      dragFrom = null;
      band.hidden = true;
      if (Math.abs(pointerShare(event) - from) * plot.clientWidth >= DRAG_PX) zoom(fromView(ends[0]), fromView(ends[1]));
    });
    plot.addEventListener("pointercancel", () => { dragFrom = null; quiet(); });
    plot.addEventListener("pointerleave", (event) => {
      if (event.pointerType === "mouse" && dragFrom === null) quiet();
    });
    plot.addEventListener("dblclick", () => show(whole));
    plot.tabIndex = 0;
    plot.addEventListener("keydown", (event) => {
      const stride = { ArrowLeft: -1, ArrowRight: 1 }[event.key], last = longest.xs.length - 1;
      if (stride) readOut(Math.min(Math.max((pointed ?? (stride > 0 ? -1 : last + 1)) + stride, 0), last));
      else if (event.key === "+") zoomBy(0.5);
      else if (event.key === "-") zoomBy(2);
      else if (event.key === "Escape") show(whole);
      else return;
      event.preventDefault();
    });
    plot.addEventListener("blur", quiet);

    const buttons = make("span", figure.querySelector("figcaption"), "zoom");
    const controls = [
      ["all", "show all", () => show(whole)],
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

  // Without a secure context (a page over plain http) there is no clipboard but the old way, through a selection.
  async function copy(text, element) {
    if (navigator.clipboard) {
      try {
        return await navigator.clipboard.writeText(text);
      } catch { /* refused: the old way may still be open */ }
    }
    getSelection().selectAllChildren(element);
    if (!document.execCommand("copy")) throw new Error("the browser does not let a page copy");
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

  document.querySelectorAll("figure.chart").forEach(enliven);
  document.querySelectorAll("pre.command").forEach(makeCopyable);
})();
