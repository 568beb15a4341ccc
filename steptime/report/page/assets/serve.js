"use strict";
// The what-if page: every change goes to the server of this machine, which answers with the plan and its report.
(() => {
  const $ = (id) => document.getElementById(id), all = (query) => [...document.querySelectorAll(query)];
  const start = JSON.parse($("data").textContent).start, yaml = $("yaml"), report = $("report");
  const state = { devices: null, pinned: "", round: 0, timer: 0 };
  const encode = (text) => btoa(String.fromCharCode(...new TextEncoder().encode(text))).replace(/\+/g, "-").replace(/\//g, "_").replace(/=+$/, "");
  const decode = (text) => new TextDecoder().decode(Uint8Array.from(atob(text.replace(/-/g, "+").replace(/_/g, "/")), (c) => c.charCodeAt(0)));

  async function ask(body) {
    const answer = await fetch("/estimate", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
    return answer.json();
  }

  async function update(change) { // change: {set, devices, best}; the answer comes at once, the rest of the report after it
    const round = ++state.round, typed = document.activeElement === yaml, began = performance.now();
    clearTimeout(state.timer);
    report.setAttribute("aria-busy", "true");
    let found;
    try { found = await ask({ yaml: yaml.value, pinned: state.pinned, full: false, ...change }); } catch (error) {
      if (round === state.round) failed([{ path: "", line: "the server does not answer; is 3dtrn serve still running?" }]);
      return;
    }
    if (round !== state.round) return;
    if (found.yaml !== undefined && !(typed && !change.set)) yaml.value = found.yaml;
    if (!found.ok) { failed(found.errors); return; }
    problems([]);
    fields(found); state.devices = found.devices;
    show(found.html, false, {});
    $("status").textContent = `${found.told}; ${found.note || `updated in ${Math.round(performance.now() - began)} ms`}`;
    document.title = found.title;
    history.replaceState(null, "", "#plan=" + encode(yaml.value));
    state.timer = setTimeout(() => rest(round), 60);
  }

  function failed(errors) { // the report stays that of the last plan without errors, and the status says so
    problems(errors);
    report.classList.add("stale");
    report.setAttribute("aria-busy", "false");
    $("status").textContent = `${errors.length} problem${errors.length === 1 ? "" : "s"}` + (report.firstChild ? "; the report is of the last plan without problems" : "");
  }

  async function rest(round) {
    const found = await ask({ yaml: yaml.value, pinned: state.pinned, full: true }).catch(() => null);
    if (!found || round !== state.round) return;
    if (!found.ok) { $("status").textContent = found.errors.map((e) => e.line).join("; "); report.setAttribute("aria-busy", "false"); return; }
    show(found.html, true, found.data);
    const compare = $("compare");
    const shut = compare.querySelector("details:not([open])");
    compare.hidden = !found.compare;
    compare.innerHTML = found.compare ? "<details open><summary>Pinned plan and this one</summary>" + found.compare + "</details>" : "";
    if (shut) compare.firstChild.open = false;
    report.setAttribute("aria-busy", "false");
  }

  function show(html, whole, data) { // html is made by the server, every text in it escaped
    const made = document.createElement("template");
    made.innerHTML = html;
    const open = all("#report details[open]").length > 0;
    if (whole || !report.firstChild) { report.replaceChildren(made.content); page.mount(report, data); } else {
      for (const part of [...made.content.children]) { const old = $(part.id); if (old) old.replaceWith(part); else report.append(part); }
      const fixes = $("fixes"); if (fixes) fixes.remove();
    }
    report.classList.toggle("stale", false);
    for (const later of report.children) later.classList.toggle("stale", !whole && !["answer", "memory", "step"].includes(later.id));
    if (open) for (const one of all("#report details")) one.open = true;
  }

  function fields(found) {
    for (const [path, { said, is }] of Object.entries(found.values)) {
      const field = $("f-" + path), slider = document.querySelector(`[data-slider="${path}"]`);
      if (field.tagName === "SELECT") {
        const none = field.querySelector('option[value=""]');
        const value = said === null || said === undefined ? "" : String(said);
        field.value = [...field.options].some((o) => o.value === value) ? value : "";
        if (none) none.textContent = "required" in field.dataset ? `as the YAML says (${is || "unnamed"})` : `default (${is})`;
      } else {
        if (document.activeElement !== field) field.value = said === null || said === undefined ? "" : said;
        field.placeholder = is === null || is === undefined ? "" : is;
      }
      if (slider && document.activeElement !== slider) slider.value = Math.log2(is || 1);
    }
    const devices = $("f-devices");
    if (document.activeElement !== devices) devices.value = found.devices;
    document.querySelector('[data-slider="devices"]').value = Math.log2(found.devices);
  }

  function problems(errors) { // a line stands beside the field that it is about, others above the report
    for (const place of all("[data-wrong]")) { place.textContent = ""; const of = $("f-" + place.dataset.wrong); if (of) of.removeAttribute("aria-invalid"); }
    const left = [];
    for (const { path, line } of errors) {
      const place = all("[data-wrong]").find((p) => path && (path === p.dataset.wrong || path.startsWith(p.dataset.wrong + ".") || (p.dataset.wrong.startsWith(path + ".") && path.includes("."))));
      if (place) { place.textContent += (place.textContent ? "\n" : "") + line; const of = $("f-" + place.dataset.wrong); if (of) of.setAttribute("aria-invalid", "true"); } else left.push(line);
    }
    $("problems").replaceChildren(...left.map((line) => { const p = document.createElement("p"); p.textContent = line; return p; }));
  }

  function value(field) {
    if (field.value === "") return null;
    if (field.tagName !== "SELECT") return Number(field.value);
    return field.value === "true" ? true : field.value === "false" ? false : /^\d+$/.test(field.value) ? Number(field.value) : field.value;
  }

  function change(path, to) {
    const kept = $("keep").checked && ["parallelism.tp", "parallelism.pp", "parallelism.cp"].includes(path);
    update(path === "devices" ? { devices: to, set: {} } : { set: { [path]: to }, devices: kept ? state.devices : null });
  }

  let wait = 0;
  const soon = (what, ms) => { clearTimeout(wait); wait = setTimeout(what, ms); };
  for (const field of all("[data-path]")) field.addEventListener(field.tagName === "SELECT" ? "change" : "input", () => soon(() => change(field.dataset.path, value(field)), field.tagName === "SELECT" ? 0 : 120));
  for (const slider of all("[data-slider]")) slider.addEventListener("input", () => { const to = 2 ** Number(slider.value); $("f-" + slider.dataset.slider).value = to; soon(() => change(slider.dataset.slider, to), 15); });
  yaml.addEventListener("input", () => soon(() => update({}), 250));
  $("best").addEventListener("click", () => { $("status").textContent = "searching ..."; update({ best: true, set: {} }); });
  $("pin").addEventListener("click", () => { state.pinned = yaml.value; update({}); });
  $("unpin").addEventListener("click", () => { state.pinned = ""; update({}); });
  $("link").addEventListener("click", async () => { try { await navigator.clipboard.writeText(location.href); $("status").textContent = "link copied"; } catch (_) { $("status").textContent = "the link is in the address bar"; } });
  $("save").addEventListener("click", () => {
    const a = document.createElement("a"); a.href = URL.createObjectURL(new Blob([yaml.value], { type: "text/yaml" })); a.download = "plan.yaml"; a.click(); setTimeout(() => URL.revokeObjectURL(a.href), 1000);
  });
  $("open").addEventListener("click", () => $("file").click());
  $("file").addEventListener("change", async () => { const [file] = $("file").files; if (file) { yaml.value = await file.slice(0, 100000).text(); $("file").value = ""; update({}); } });
  function link() { const found = location.hash.match(/^#plan=([\w-]+)$/); try { return found ? decode(found[1]) : ""; } catch (_) { return ""; } }
  addEventListener("hashchange", () => { const text = link(); if (text && text !== yaml.value) { yaml.value = text; update({}); } });
  yaml.value = link() || start;
  update({});
})();
