"use strict";
// Draws the figures with Bokeh, and connects them with the texts of the page. All texts of the
// model become text nodes.
(async () => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);

  function element(name, content, cls) {
    const made = document.createElement(name);
    if (cls) made.className = cls;
    if (content !== undefined) made.append(content);
    return made;
  }

  function table(rows) {
    const made = element("table");
    for (const cells of rows) {
      const row = made.insertRow();
      for (const cell of cells) row.insertCell().append(cell);
    }
    return made;
  }

  function bytes(size) {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let unit = 0;
    while (size >= 1024 && unit < 4) [size, unit] = [size / 1024, unit + 1];
    return unit ? `${size.toFixed(2)} ${units[unit]}` : `${size} B`;
  }

  function time(seconds) {
    if (seconds >= 1) return `${seconds.toFixed(2)} s`;
    return seconds >= 1e-3 ? `${(seconds * 1e3).toFixed(1)} ms` : `${(seconds * 1e6).toFixed(0)} us`;
  }

  function plural(count, noun) {
    return `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
  }

  // --- figures ---
  for (const [name, figure] of Object.entries(data.figures)) {
    await Bokeh.embed.embed_item(figure, name);
  }
  const model = (name) => {
    for (const one of Bokeh.documents) {
      const found = one.get_model_by_name(name);
      if (found) return found;
    }
    return null;
  };

  // --- a click on a bar ---
  const spans = data.lanes.spans;
  const source = model("spans");
  function describe(index) {
    const span = spans[index];
    const rows = [
      ["stream", data.lanes.names[span.lane]],
      ["phase", span.phase],
      ["starts at", time(span.start_seconds)],
      ["takes", time(span.end_seconds - span.start_seconds)],
    ];
    if (span.events > 1) rows.push(["events", span.events.toLocaleString("en")]);
    const parts = [element("h4", span.label), table(rows)];
    if (span.exposed_seconds > 0) {
      parts.push(element("p", `compute waits ${time(span.exposed_seconds)}`));
      if (span.reason) parts.push(element("p", span.reason, "reason"));
    } else if (span.kind === "gather" || span.kind === "reduce") {
      parts.push(element("p", "hidden behind compute"));
    }
    if (span.serves.length) parts.push(element("p", `for ${span.serves.join(", ")}`, "hint"));
    byId("detail").replaceChildren(...parts);
  }
  source.selected.properties.indices.change.connect(() => {
    const chosen = source.selected.indices;
    if (!byId("search").value && chosen.length) describe(chosen[0]);
  });

  // --- search ---
  byId("search").addEventListener("input", (event) => {
    const wanted = event.target.value.trim().toLowerCase();
    const found = [];
    let seconds = 0;
    if (wanted) {
      spans.forEach((span, index) => {
        const text = `${span.label} ${span.serves.join(" ")}`.toLowerCase();
        if (!text.includes(wanted)) return;
        found.push(index);
        seconds += span.end_seconds - span.start_seconds;
      });
    }
    byId("found").textContent = wanted ? `${plural(found.length, "bar")}, ${time(seconds)}` : "";
    // A selection of a number that no bar has fades all of them.
    source.selected.indices = wanted && !found.length ? [-1] : found;
  });

  // --- memory under the cursor ---
  const memory = data.memory;
  const kinds = Object.keys(memory.bytes_by_kind);
  const scale = model("times").end / data.lanes.step_seconds; // the axis has its own unit
  const totals = memory.seconds.map((_, index) =>
    kinds.reduce((sum, kind) => sum + memory.bytes_by_kind[kind][index], 0));
  function alive(seconds, isPeak) {
    let low = 0;
    let high = memory.seconds.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (memory.seconds[middle] <= seconds) low = middle;
      else high = middle - 1;
    }
    if (isPeak) low = totals.indexOf(memory.peak_bytes);
    const rows = [];
    for (const kind of [...kinds].reverse()) {
      const size = memory.bytes_by_kind[kind][low];
      if (!size) continue;
      const dot = element("i");
      dot.style.background = data.colours.memory[kind];
      const name = element("span");
      name.append(dot, kind);
      rows.push([bytes(size), name]);
    }
    const here = isPeak ? memory.peak_buffers : memory.buffers.filter(
      (one) => one.start_seconds <= seconds && seconds < one.end_seconds);
    const parts = [
      element("h4", `${isPeak ? "the peak, " : ""}${bytes(totals[low])} at ${time(seconds)}`),
      table(rows),
    ];
    if (here.length) {
      parts.push(element("h4", "largest tensors of the step"));
      parts.push(table(here.slice(0, 7).map((one) => [bytes(one.size_bytes), one.label])));
      if (here.length > 7) parts.push(element("p", `and ${here.length - 7} more`, "hint"));
    }
    byId("alive").replaceChildren(...parts);
  }
  for (const name of ["memory", "timeline"]) {
    const view = Bokeh.index.find_one(model(name));
    view.el.addEventListener("mousemove", (event) => {
      const left = event.clientX - view.el.getBoundingClientRect().left;
      const peak = view.frame.x_scale.compute(memory.peak_seconds * scale);
      if (Math.abs(left - peak) < 4) return alive(memory.peak_seconds, true);
      const x = view.frame.x_scale.invert(left);
      return alive(Math.min(Math.max(x / scale, 0), data.lanes.step_seconds), false);
    });
  }
  alive(memory.peak_seconds, true);

  // --- tables and the tree ---
  const plan = byId("plan");
  const body = plan.tBodies[0];
  [...plan.tHead.rows[0].cells].forEach((head, column) => {
    head.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      for (const other of plan.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const value = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
      const isNumber = head.classList.contains("number");
      const rows = [...body.rows].sort((a, b) => isNumber
        ? Number(value(a)) - Number(value(b))
        : value(a).localeCompare(value(b), "en", { numeric: true }));
      body.append(...(down ? rows.reverse() : rows));
    });
  });
  byId("filter").addEventListener("input", (event) => {
    const wanted = event.target.value.trim().toLowerCase();
    for (const row of body.rows) row.hidden = !row.textContent.toLowerCase().includes(wanted);
  });
  for (const [id, open] of [["open-all", true], ["close-all", false]]) {
    byId(id).addEventListener("click", () => {
      for (const one of document.querySelectorAll("#panel-modules details")) one.open = open;
    });
  }
  document.body.dataset.drawn = "yes";
})();
