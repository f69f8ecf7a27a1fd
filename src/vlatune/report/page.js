// Interaction of a page: charts show values, and commands can be copied.
//
// chart.py has drawn the curves: without this script the page is complete but static. A chart's values are in its
// `data-chart`; text is always set as text, never as markup. Numbers equal those of formatting.py, which the browser
// tests check.
"use strict";
(() => {
  const NEAR = 2; // percent of the x axis within which a line's point belongs to the pointer

  // Numbers, as in formatting.py.

  const plain = (text) => text.replace(/(\.\d*?)0+(?=e|$)/, "$1").replace(/\.(?=e|$)/, "");

  function number(value, digits = 4) {
    const size = Math.abs(value);
    if (size >= 1e9) return plain(value.toExponential(digits - 1)).replace(/e\+(\d)$/, "e$1");
    if (size >= 1000) return Math.round(value).toLocaleString("en-US");
    return size !== 0 && size < 1e-4 ? plain(value.toExponential(digits - 1)) : String(Number(value.toPrecision(digits)));
  }

  function make(name, parent, className, text = "") {
    const made = parent.appendChild(document.createElement(name));
    made.className = className;
    made.textContent = text;
    return made;
  }

  function addInteraction(figure) {
    const chart = JSON.parse(figure.dataset.chart), plot = figure.querySelector(".plot");
    const [low, high] = chart.x, place = (x) => (100 * (x - low)) / (high - low);
    const [factor, suffix] = chart.format, write = (value) => number(value * factor) + suffix;
    const lines = [];
    for (const line of chart.lines) lines.push({ ...line, xs: line.xs ?? lines.at(-1).xs });
    const longest = lines.reduce((most, line) => (line.xs.length > most.xs.length ? line : most));
    const cross = make("div", plot, "cross"), box = make("div", plot, "readout");
    box.setAttribute("role", "status");
    let pointed = null;

    function hide() {
      cross.hidden = box.hidden = true;
    }

    const nearest = (line, at) =>
      line.xs.reduce((best, x, index) => {
        const distance = Math.abs(place(x) - at);
        return line.ys[index] !== null && distance < best.distance ? { index, distance } : best;
      }, { index: null, distance: Infinity });

    function show(index) {
      const at = place(longest.xs[index]);
      pointed = index;
      cross.style.left = `${at}%`;
      box.replaceChildren();
      make("b", box, "", `${chart.xName} ${number(longest.xs[index], 6)}`);
      for (const line of lines) {
        const found = nearest(line, at);
        if (found.distance > NEAR) continue;
        const row = make("span", box, "key");
        make("i", row, line.style);
        make("span", row, "", `${line.name} ${write(line.ys[found.index])}`);
      }
      cross.hidden = box.hidden = false;
      const bounds = plot.getBoundingClientRect(), size = box.offsetWidth, x = (at / 100) * bounds.width;
      const beside = x + 12 + size + bounds.left < document.documentElement.clientWidth ? x + 12 : x - 12 - size;
      box.style.left = `${Math.max(beside, 4 - bounds.left)}px`;
    }

    function showAt(event) {
      const bounds = plot.getBoundingClientRect();
      const found = nearest(longest, (100 * (event.clientX - bounds.left)) / bounds.width);
      if (found.index !== null) show(found.index);
    }

    hide();
    plot.addEventListener("pointerdown", showAt);
    plot.addEventListener("pointermove", showAt);
    plot.addEventListener("pointercancel", hide);
    plot.addEventListener("pointerleave", (event) => {
      if (event.pointerType === "mouse") hide();
    });
    plot.tabIndex = 0;
    plot.addEventListener("keydown", (event) => {
      const stride = { ArrowLeft: -1, ArrowRight: 1 }[event.key], last = longest.xs.length - 1;
      if (!stride) return;
      show(Math.min(Math.max((pointed ?? (stride > 0 ? -1 : last + 1)) + stride, 0), last));
      event.preventDefault();
    });
    plot.addEventListener("blur", hide);
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
