"use strict";
// The page's script: the schedule, sorting, copying, light and dark. It asks no network for anything.
const page = (() => {
  const KINDS = ["F", "B", "I", "W"], WORDS = { F: "forward", B: "backward", I: "gradients of the inputs", W: "gradients of the weights" };
  const css = (name, of) => getComputedStyle(of || document.documentElement).getPropertyValue(name).trim();
  const fill = (name) => { // the color of a class of the palette
    const probe = document.createElement("i");
    probe.className = name; probe.hidden = true; document.body.append(probe);
    const found = css("--own", probe); probe.remove();
    return found || css("--t-other") || "#8c8c8c";
  };
  const seconds = (s) => s >= 1 ? s.toPrecision(4) + " s" : s >= 1e-3 ? (1e3 * s).toPrecision(4) + " ms" : (1e6 * s).toPrecision(4) + " us";

  async function inflate(text) {
    const raw = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
    const stream = new Blob([raw]).stream().pipeThrough(new DecompressionStream("deflate"));
    return JSON.parse(await new Response(stream).text());
  }

  function unpack(gaps, order, lengths, vpp) { // three numbers an action, to start, code and micro-batch
    const n = gaps.length, starts = new Float64Array(n), codes = new Uint16Array(n), batches = new Int32Array(n);
    const last = new Array(lengths.length).fill(-1);
    let at = 0;
    for (let i = 0; i < n; i++) {
      const code = order[2 * i], start = at + gaps[i];
      starts[i] = start; codes[i] = code; batches[i] = last[code] = last[code] + 1 + order[2 * i + 1];
      at = start + lengths[code];
    }
    return { starts, codes, batches, lengths, vpp };
  }

  function before(starts, tick) { // the last action that starts at or before a tick
    let low = 0, high = starts.length;
    while (low < high) { const mid = (low + high) >> 1; if (starts[mid] <= tick) low = mid + 1; else high = mid; }
    return low - 1;
  }

  class Schedule {
    constructor(canvas, data, gaps, order) {
      this.canvas = canvas; this.data = data; this.row = Number(canvas.dataset.row);
      this.stages = gaps.map((row, i) => unpack(row, order[i], data.lengths[i], data.vpp));
      this.from = 0; this.to = data.ticks; this.left = 66; this.top = 22;
      this.readout = canvas.parentElement.querySelector(".readout");
      canvas.addEventListener("wheel", (e) => { if (e.ctrlKey || !e.shiftKey) { e.preventDefault(); this.zoom(e.deltaY > 0 ? 1.25 : 0.8, this.tickAt(e.offsetX)); } }, { passive: false });
      canvas.addEventListener("pointerdown", (e) => { this.drag = { x: e.offsetX, from: this.from, to: this.to }; canvas.setPointerCapture(e.pointerId); });
      canvas.addEventListener("pointerup", () => { this.drag = null; });
      canvas.addEventListener("pointermove", (e) => this.drag ? this.pan(e.offsetX) : this.tell(e.offsetX, e.offsetY));
      canvas.addEventListener("keydown", (e) => this.key(e));
      for (const button of canvas.parentElement.querySelectorAll("[data-zoom]")) button.addEventListener("click", () => this.show(button.dataset.zoom));
      new ResizeObserver(() => this.draw()).observe(canvas);
      this.at = { stage: 0, index: 0 };
    }
    tickAt(x) { return this.from + (x - this.left) / (this.width - this.left) * (this.to - this.from); }
    xOf(tick) { return this.left + (tick - this.from) / (this.to - this.from) * (this.width - this.left); }
    zoom(by, around) {
      const span = Math.min(this.data.ticks, Math.max(50, (this.to - this.from) * by)), share = (around - this.from) / (this.to - this.from);
      this.window(around - share * span, span);
    }
    window(from, span) {
      this.from = Math.max(0, Math.min(this.data.ticks - span, from)); this.to = this.from + span; this.draw();
    }
    pan(x) {
      const span = this.drag.to - this.drag.from;
      this.window(this.drag.from - (x - this.drag.x) / (this.width - this.left) * span, span);
    }
    show(what) {
      const middle = (this.from + this.to) / 2, all = this.data.ticks, share = Math.max(all / 200, Math.min(all, 4 * this.stages.length * (this.data.end - this.data.start) / (this.data.microbatches + this.stages.length) / 2));
      if (what === "in") this.zoom(0.5, middle);
      if (what === "out") this.zoom(2, middle);
      if (what === "all") this.window(0, all);
      if (what === "first") this.window(0, share);
      if (what === "last") this.window(all - share, share);
    }
    key(e) {
      const span = this.to - this.from, of = this.stages[this.at.stage], moves = { "+": 0.5, "=": 0.5, "-": 2 };
      if (moves[e.key]) this.zoom(moves[e.key], this.chosen ? Math.min(this.to, Math.max(this.from, of.starts[this.at.index])) : (this.from + this.to) / 2);
      else if (e.key === "ArrowRight" || e.key === "ArrowLeft") {
        const by = e.key === "ArrowRight" ? 1 : -1;
        this.at.index = Math.max(0, Math.min(of.starts.length - 1, this.at.index + by));
      } else if (e.key === "ArrowUp" || e.key === "ArrowDown") {
        this.at.stage = Math.max(0, Math.min(this.stages.length - 1, this.at.stage + (e.key === "ArrowDown" ? 1 : -1)));
      } else if (e.key === "Home") this.window(0, this.data.ticks);
      else return;
      e.preventDefault();
      const now = this.stages[this.at.stage], start = now.starts[this.at.index];
      if (e.key.startsWith("Arrow")) { if (start < this.from || start > this.to) this.window(start - span / 2, span); this.chosen = true; this.draw(); this.say(this.at.stage, this.at.index); }
    }
    tell(x, y) {
      const stage = Math.floor((y - this.top) / this.row), tick = this.tickAt(x);
      if (stage < 0 || stage >= this.stages.length || tick < this.from) return;
      const of = this.stages[stage], i = before(of.starts, tick), where = this.data.step_s / this.data.ticks;
      for (const [track, name, , start, length] of this.data.beside[stage]) {
        const low = track === "compute" || (y - this.top) % this.row > this.row * 0.72;
        if (low && tick >= start && tick <= start + length) { this.readout.textContent = `stage ${stage}, ${track}: ${name}, ${seconds(length * where)} from ${seconds(start * where)}`; return; }
      }
      if (i >= 0 && tick <= of.starts[i] + of.lengths[of.codes[i]]) { this.at = { stage, index: i }; this.say(stage, i); return; }
      const from = i >= 0 ? of.starts[i] + of.lengths[of.codes[i]] : 0, to = i + 1 < of.starts.length ? of.starts[i + 1] : this.data.ticks;
      const why = tick >= this.data.start && tick <= this.data.end ? "idle: bubble, or waiting for a send" : "waiting";
      this.readout.textContent = `stage ${stage}: ${why}, ${seconds((to - from) * where)} from ${seconds(from * where)}`;
    }
    say(stage, i) {
      const of = this.stages[stage], code = of.codes[i], chunk = code % of.vpp, where = this.data.step_s / this.data.ticks;
      const layers = this.data.layers[stage][chunk] || "no layers", kind = KINDS[Math.floor(code / of.vpp)];
      const which = of.vpp > 1 ? `, chunk ${chunk}` : "";
      this.readout.textContent = `stage ${stage}: ${WORDS[kind]} of micro-batch ${of.batches[i]}${which} (${layers}), ${seconds(of.lengths[code] * where)} from ${seconds(of.starts[i] * where)}`;
    }
    draw() {
      const scale = window.devicePixelRatio || 1, { canvas, row, top } = this, n = this.stages.length;
      this.width = canvas.clientWidth;
      if (!this.width) return;
      const height = top + n * row + 14;
      canvas.style.height = height + "px"; canvas.width = this.width * scale; canvas.height = height * scale;
      const g = canvas.getContext("2d"), colors = { F: fill("p-F"), B: fill("p-B"), I: fill("p-I"), W: fill("p-W"), idle: fill("t-bubble") };
      g.scale(scale, scale); g.clearRect(0, 0, this.width, height);
      g.font = "11px system-ui, DejaVu Sans, sans-serif"; g.fillStyle = css("--fg"); g.textBaseline = "middle";
      this.axis(g, height);
      for (let stage = 0; stage < n; stage++) {
        if (row >= 10 || stage % 4 === 0) { g.fillStyle = css("--fg"); g.fillText((n > 1 ? "stage " : "device ") + stage, 6, top + stage * row + row / 2 - 1); }
        this.drawStage(g, stage, top + stage * row, colors);
      }
    }
    drawStage(g, stage, y, colors) {
      const of = this.stages[stage], high = this.row - 3, lane = this.row >= 12 ? high * 0.76 : high;
      const first = Math.max(this.xOf(this.data.start), this.left), last = Math.min(this.xOf(this.data.end), this.width);
      if (last > first) { g.fillStyle = colors.idle; g.fillRect(first, y, last - first, lane); hatch(g, first, y, last - first, lane); }
      const from = Math.max(0, before(of.starts, this.from));
      for (let i = from; i < of.starts.length && of.starts[i] < this.to; i++) {
        const code = of.codes[i], x = Math.max(this.left, this.xOf(of.starts[i])), end = Math.min(this.width, this.xOf(of.starts[i] + of.lengths[code]));
        if (end <= this.left) continue;
        g.fillStyle = colors[KINDS[Math.floor(code / of.vpp)]];
        g.fillRect(x, y, end - x, lane);
        if (end - x > 3) { g.strokeStyle = css("--bg"); g.lineWidth = 0.7; g.strokeRect(x, y, end - x, lane); }
        if (end - x > 26 && lane > 11) { g.fillStyle = code < of.vpp ? "#0b1b2b" : "#ffffff"; g.fillText(String(of.batches[i]), x + 4, y + lane / 2 + 0.5); }
      }
      for (const [track, , kind, start, length] of this.data.beside[stage]) {
        const x = Math.max(this.left, this.xOf(start)), end = Math.min(this.width, this.xOf(start + length));
        if (end <= this.left || x >= this.width || (track !== "compute" && this.row < 12)) continue;
        g.fillStyle = fill("t-" + kind);
        if (track === "compute") g.fillRect(x, y, Math.max(end - x, 0.5), lane);
        else g.fillRect(x, y + lane + 1, Math.max(end - x - 0.4, 0.5), high - lane - 1);
      }
      if (stage === this.at.stage && this.chosen) {
        const i = this.at.index, x = Math.max(this.left, this.xOf(of.starts[i])), end = Math.min(this.width, this.xOf(of.starts[i] + of.lengths[of.codes[i]]));
        if (end > this.left && x < this.width) { g.strokeStyle = css("--fg"); g.lineWidth = 2; g.strokeRect(x, y, Math.max(end - x, 2), lane); }
      }
    }
    axis(g, height) {
      const span = (this.to - this.from) * this.data.step_s / this.data.ticks, rough = span / 6, power = 10 ** Math.floor(Math.log10(rough));
      const step = [1, 2, 5, 10].map((x) => x * power).find((x) => x >= rough), start = this.from * this.data.step_s / this.data.ticks;
      const [unit, size] = start + span >= 1 ? ["s", 1] : start + span >= 1e-3 ? ["ms", 1e-3] : ["us", 1e-6], digits = Math.max(0, -Math.floor(Math.log10(step / size) + 1e-9));
      g.strokeStyle = css("--line"); g.lineWidth = 1; g.fillStyle = css("--soft");
      for (let n = Math.ceil(start / step), t = n * step; t <= start + span * 1.0001; t = ++n * step) { // as many digits as tell one label from the next
        const x = this.xOf(t * this.data.ticks / this.data.step_s);
        g.beginPath(); g.moveTo(x, 16); g.lineTo(x, height); g.stroke();
        g.textAlign = x > this.width - 40 ? "right" : "left"; g.fillText(n === 0 ? "0" : (t / size).toFixed(digits) + " " + unit, x + (x > this.width - 40 ? -3 : 3), 9);
      }
      g.textAlign = "left";
    }
  }

  function hatch(g, x, y, width, height) {
    g.save(); g.beginPath(); g.rect(x, y, width, height); g.clip();
    g.strokeStyle = css("--edge"); g.globalAlpha = 0.45; g.lineWidth = 1; g.beginPath();
    for (let at = Math.floor(x / 7) * 7 - height; at < x + width; at += 7) { g.moveTo(at, y + height); g.lineTo(at + height, y); }
    g.stroke(); g.restore();
  }

  const boxes = new ResizeObserver((seen) => { // what scrolls is reached by the tab key, what fits is not
    for (const { target: box } of seen) {
      if (box.scrollWidth > box.clientWidth || box.scrollHeight > box.clientHeight) box.tabIndex = 0; else box.removeAttribute("tabindex");
    }
  });
  const drawn = [];
  async function mount(root, data) { // everything under `root` that a script brings to life
    for (const canvas of root.querySelectorAll("canvas[data-schedule]")) {
      if (!data || !data.schedule) continue;
      const made = new Schedule(canvas, data.schedule, await inflate(data.schedule.gaps), await inflate(data.schedule.order));
      drawn.push(made); made.draw();
    }
    for (const box of root.querySelectorAll(".scroll")) boxes.observe(box);
    for (const button of root.querySelectorAll("[data-sort]")) button.addEventListener("click", () => sort(button));
    for (const button of root.querySelectorAll("[data-copy]")) button.addEventListener("click", () => copy(button));
  }

  function sort(button) {
    const head = button.closest("th"), table = head.closest("table"), index = Number(button.dataset.sort), body = table.tBodies[0];
    const down = head.getAttribute("aria-sort") === "descending" || (head.getAttribute("aria-sort") === null && !head.classList.contains("n"));
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "ascending" : "descending");
    const value = (row) => { const cell = row.cells[index]; return "v" in cell.dataset ? Number(cell.dataset.v) : cell.textContent; };
    const order = (a, b) => { const x = value(a), y = value(b); return (typeof x === "number" ? x - y : x.localeCompare(y)) * (down ? 1 : -1); };
    body.append(...[...body.rows].sort(order));
  }

  async function copy(button) {
    const of = document.getElementById(button.dataset.copy), text = "value" in of ? of.value : of.textContent;
    try { await navigator.clipboard.writeText(text); } catch (_) { // no clipboard for a file: select it, for the keyboard
      const range = document.createRange(); range.selectNodeContents(of);
      const chosen = getSelection(); chosen.removeAllRanges(); chosen.addRange(range);
      button.textContent = "selected"; setTimeout(() => { button.textContent = "copy"; }, 1500); return;
    }
    button.textContent = "copied"; setTimeout(() => { button.textContent = "copy"; }, 1500);
  }

  const redraw = () => drawn.filter((s) => s.canvas.isConnected).forEach((s) => s.draw());
  function theme(name) { document.documentElement.dataset.theme = name; redraw(); }
  document.addEventListener("click", (e) => {
    const of = e.target.closest ? e.target : null;
    if (of && of.closest("[data-theme-toggle]")) theme((document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark" ? "light" : "dark");
    if (of && of.closest("[data-print]")) window.print();
  });
  let kept = null;
  window.addEventListener("beforeprint", () => {
    kept = { theme: document.documentElement.dataset.theme, open: [...document.querySelectorAll("details:not([open])")] };
    for (const one of kept.open) one.open = true;
    theme("light");
  });
  window.addEventListener("afterprint", () => {
    for (const one of kept ? kept.open : []) one.open = false;
    if (kept && kept.theme) theme(kept.theme); else { delete document.documentElement.dataset.theme; redraw(); }
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  const unfold = () => { const of = location.hash && document.getElementById(location.hash.slice(1)); if (of && of.tagName === "DETAILS") { of.open = true; of.scrollIntoView(); } };
  window.addEventListener("hashchange", unfold);
  unfold();
  document.addEventListener("click", (e) => { const link = e.target.closest && e.target.closest("a[href^='#']"); if (link) setTimeout(unfold, 0); });
  return { mount, redraw };
})();
page.mount(document, JSON.parse(document.getElementById("data").textContent));
