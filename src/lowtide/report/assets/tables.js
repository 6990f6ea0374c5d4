// Tiles, bars, lists and tables.
"use strict";

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "style") Object.assign(made.style, value);
    else if (value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

function swatch(fill, more = "") {
  return element("span", {class: `swatch ${more}`, style: {background: fill}, "aria-hidden": "true"});
}

function dashed(line, name) {
  line.style.background = `repeating-linear-gradient(90deg, ${variable(name)} 0 5px, transparent 5px 8px)`;
}

function variable(name) {
  return `var(--${name})`;
}

/** A bar of parts, each as wide as its share of `whole`. */
function bar(parts, whole, label = null) {
  const inside = parts
    .filter(([, bytes]) => bytes > 0)
    .map(([name, bytes]) =>
      element("i", {style: {background: variable(name), width: `${(100 * bytes) / whole}%`}}),
    );
  return element(
    "div",
    {class: "bar", role: label ? "img" : null, "aria-label": label, "aria-hidden": label ? null : "true"},
    ...inside,
  );
}

function tile(name, number, ...lines) {
  return element(
    "div",
    {class: "card tile"},
    element("p", {class: "name"}, name),
    element("div", {class: "number"}, number),
    ...lines.map((line) => element("p", {}, line)),
  );
}

/** What the plan added to the step, as a share of it: beside plain steps, else of the planned steps that were
 * timed; null where none was. */
function measuredExtra(data) {
  const {calibrated_plain_seconds: plain, calibrated_extra_seconds: extra} = data.summary;
  return data.measured_extra ?? (plain && extra !== null && extra !== undefined ? extra / plain : null);
}

function tiles(data) {
  const {summary, measured_planned: ran} = data;
  const extra = measuredExtra(data);
  const plain = summary.plain_peak_bytes;
  const peak = summary.predicted_peak_bytes;
  const saved = plain ? 1 - peak / plain : 0;
  const budget = summary.budget_bytes;
  const held =
    ran && ran.peak_bytes !== null && budget
      ? ran.peak_bytes <= budget
        ? ["good", `held: ${bytesText(ran.peak_bytes)} measured`]
        : ["bad", `exceeded: ${bytesText(ran.peak_bytes)} measured`]
      : null;
  const added = addedText(summary.predicted_extra_seconds);
  const forecast = `${secondsText(summary.plain_seconds)} plain ${added}, forecast`;
  const shown = [
    tile(
      "Peak",
      bytesText(peak),
      saved > 0.0005
        ? `${percentText(saved)} less than the plain step's ${bytesText(plain)}`
        : "as much as the plain step",
    ),
    tile(
      "Extra time",
      signedPercent(summary.plain_seconds ? summary.predicted_extra_seconds / summary.plain_seconds : 0),
      forecast,
      ...(extra === null ? [] : [element("span", {class: "number"}, signedPercent(extra)), "measured"]),
    ),
  ];
  if (budget) {
    const line = element("span", {class: held ? held[0] : ""}, held ? held[1] : "not measured yet");
    shown.unshift(tile("Budget", bytesText(budget), line, `${percentText(peak / budget)} of it is used`));
  }
  if (summary.bound_peak_bytes) {
    const gap = Math.max(0, summary.predicted_extra_seconds - summary.bound_extra_seconds);
    shown.push(
      tile(
        "From the best possible",
        percentText(summary.plain_seconds ? gap / summary.plain_seconds : 0, 2),
        "of the step is the most that a better plan could win",
        `no schedule goes below ${bytesText(summary.bound_peak_bytes)}`,
      ),
    );
  }
  return shown;
}

/** The peak of a step as one bar with its shares, on a scale that both steps have in common. */
function peakBar(name, step, whole, budget) {
  const kinds = step.kindsAt(step.peakTick);
  const parts = KINDS.map((kind) => [kind, kinds[kind]]);
  const shares = parts.filter(([, bytes]) => bytes > 0).sort((a, b) => b[1] - a[1]);
  const words = shares.map(([kind, bytes]) => `${KIND_WORDS[kind]} ${bytesText(bytes)}`).join(", ");
  const scaled = element("div", {class: "scaled"}, bar(parts, whole, `${name}: ${words}`));
  if (budget)
    scaled.append(
      element("div", {
        class: "budget",
        style: {left: `${(100 * budget) / whole}%`},
        title: `budget ${bytesText(budget)}`,
      }),
    );
  return element(
    "div",
    {class: "peak"},
    element(
      "p",
      {},
      element("b", {}, `${name}: ${bytesText(step.peakBytes)}`),
      element(
        "span",
        {class: "quiet"},
        ` at ${secondsText(step.ticks.seconds[step.peakTick])}, ${step.running(step.peakTick)}`,
      ),
    ),
    scaled,
    element(
      "ul",
      {class: "shares"},
      ...shares.map(([kind, bytes]) =>
        element(
          "li",
          {},
          swatch(variable(kind)),
          `${KIND_WORDS[kind]} `,
          element("span", {class: "bytes"}, bytesText(bytes)),
          element(
            "span",
            {class: "quiet"},
            ` ${bytes < 0.005 * step.peakBytes ? "<1 %" : percentText(bytes / step.peakBytes, 0)}`,
          ),
        ),
      ),
    ),
  );
}

/** What is in memory at a tick, for the list beside the charts. */
function who(step, tick, name, most = 9) {
  const kinds = step.kindsAt(tick);
  const holders = step.holders(tick);
  const rest = holders.slice(most).reduce((sum, holder) => sum + holder.bytes, 0);
  const row = (left, bytes, small) =>
    element(
      "li",
      {},
      element("span", {}, ...left, small ? element("small", {}, small) : null),
      element("span", {class: "bytes"}, bytesText(bytes)),
    );
  return [
    element("h3", {}, `${bytesText(step.live[tick])} at ${secondsText(step.ticks.seconds[tick])}`),
    element("p", {class: "quiet"}, `${name}, ${step.running(tick)}`),
    bar(
      KINDS.map((kind) => [kind, kinds[kind]]),
      step.peakBytes,
    ),
    element(
      "ol",
      {},
      ...holders
        .slice(0, most)
        .map((holder) =>
          row(
            [swatch(variable(holder.kind)), title(holder)],
            holder.bytes,
            [KIND_WORDS[holder.kind], holder.form, decision(holder)].filter(Boolean).join(", "),
          ),
        ),
      rest ? row([`${holders.length - most} smaller ones`], rest) : null,
    ),
  ];
}

/** What the plan decided, where the kind does not say so. */
function decision(holder) {
  return holder.kind === "recomputed" ? "" : holder.decision;
}

/** Where a block of memory is at home, and its name or the operation that wrote it. */
function title(holder) {
  const count = holder.count > 1 ? `${holder.count} × ` : "";
  const name = holder.name.replace(/\b(aten|prims)\./, "");
  return `${count}${holder.where ? `${holder.where}: ` : ""}${name}`;
}

/** A table in a box of its own that scrolls, and that the keyboard reaches. */
function table(label, columns, rows) {
  const head = element(
    "tr",
    {},
    ...columns.map(([name, kind]) => element("th", {scope: "col", class: kind}, name)),
  );
  return element(
    "div",
    {class: "scroll", tabindex: "0", role: "region", "aria-label": `${label}: table`},
    element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows)),
  );
}

function tableRow(columns, cells, attributes = {}) {
  return element(
    "tr",
    attributes,
    ...cells.map((cell, k) =>
      element(k ? "td" : "th", {class: columns[k][1], scope: k ? null : "row"}, ...[cell].flat()),
    ),
  );
}

function holdersTable(step, most = 40) {
  const columns = [
    ["block of memory", ""],
    ["what it is", "wide"],
    ["how many", "n wide"],
    ["bytes", "n"],
    ["share", "n wide"],
  ];
  const holders = step.holders(step.peakTick);
  const rows = holders.slice(0, most).map((holder) => {
    const name = [
      swatch(variable(holder.kind)),
      title({...holder, count: 1}),
      element("small", {}, [holder.form, decision(holder)].filter(Boolean).join(", ")),
    ];
    return tableRow(columns, [
      name,
      KIND_WORDS[holder.kind],
      String(holder.count),
      bytesText(holder.bytes),
      percentText(holder.bytes / step.peakBytes),
    ]);
  });
  const rest = holders.slice(most);
  const sum = rest.reduce((total, holder) => total + holder.bytes, 0);
  if (sum)
    rows.push(
      tableRow(columns, [
        `${rest.length} smaller ones`,
        "",
        "",
        bytesText(sum),
        percentText(sum / step.peakBytes),
      ]),
    );
  return table("Who holds memory at the peak", columns, rows);
}

const DECISION_COLORS = {
  kept: "activation",
  recomputed: "recomputed",
  offloaded: "moved",
  compressed: "optimizer",
  sharded: "gradient",
};

function decidedTable(data) {
  const names = Object.keys(DECISION_COLORS);
  const columns = [
    ["layer", ""],
    ["saved by autograd", "n"],
    ["kept", "n wide"],
    ["run again", "n wide"],
    ["extra time", "n"],
  ];
  const layers = new Map();
  for (const row of data.decided) {
    const layer = data.layers[row.module];
    if (!layers.has(layer)) layers.set(layer, []);
    layers.get(layer).push(row);
  }
  const sum = (rows) => ({
    saved_bytes: names.map((_, k) => rows.reduce((total, row) => total + row.saved_bytes[k], 0)),
    replayed: rows.reduce((total, row) => total + row.replayed, 0),
    extra_seconds: rows.reduce((total, row) => total + row.extra_seconds, 0),
  });
  const total = (row) => row.saved_bytes.reduce((a, b) => a + b, 0);
  const whole = Math.max(1, ...[...layers.values()].map((rows) => total(sum(rows))));
  const line = (first, row, attributes) =>
    tableRow(
      columns,
      [
        first,
        [
          bytesText(total(row)),
          bar(
            names.map((name, k) => [DECISION_COLORS[name], row.saved_bytes[k]]),
            whole,
          ),
        ],
        bytesText(row.saved_bytes[0]),
        row.replayed ? `${row.replayed} operation${row.replayed > 1 ? "s" : ""}` : "",
        row.extra_seconds ? secondsText(row.extra_seconds) : "",
      ],
      attributes,
    );
  const lines = [];
  [...layers].forEach(([layer, rows], number) => {
    const name = layer || "the model itself";
    if (rows.length === 1) {
      lines.push(line(rows[0].module || name, rows[0], {}));
      return;
    }
    const inside = rows.map((row, k) =>
      line(row.module.slice(layer.length + 1) || "itself", row, {
        class: "inside",
        hidden: "",
        id: `inside-${number}-${k}`,
      }),
    );
    const button = element(
      "button",
      {
        type: "button",
        class: "expand",
        "aria-expanded": "false",
        "aria-label": `more or less of ${name}`,
        "aria-controls": inside.map((row) => row.id).join(" "),
      },
      "more",
    );
    button.addEventListener("click", () => {
      const open = button.getAttribute("aria-expanded") !== "true";
      button.setAttribute("aria-expanded", String(open));
      button.textContent = open ? "less" : "more";
      for (const row of inside) row.hidden = !open;
    });
    lines.push(line([button, name], sum(rows), {}), ...inside);
  });
  if (!lines.length) return element("p", {}, "Autograd saves nothing here that a plan could give up.");
  lines.push(line("total", sum(data.decided), {}));
  return table("Decisions by layer", columns, lines);
}

function budgetsTable(data) {
  const columns = [
    ["peak", ""],
    ["extra time", "n"],
    ["best possible", "n"],
  ];
  const plain = data.summary.plain_seconds || 1;
  return table(
    "Other budgets",
    columns,
    data.points.map((point) =>
      tableRow(columns, [
        bytesText(point.peak_bytes),
        signedPercent(point.extra_seconds / plain),
        signedPercent(point.bound_seconds / plain),
      ]),
    ),
  );
}

const MISSING = {
  "not run": "the plain step ran nowhere beside the planned one; lowtide train --report runs both.",
  "no meter": "memory cannot be measured while a step runs here; lowtide doctor says what that takes.",
  "not timed": "too few steps have ended, or this engine times none; lowtide train --report runs pairs.",
};

function measuredTable(data) {
  const {summary, measured_plain: plain, measured_planned: planned} = data;
  const columns = [
    ["of a step", ""],
    ["forecast", "n"],
    ["measured", "n"],
    ["difference", "n"],
  ];
  const rows = [];
  const missing = new Set();
  const why = (reason) => {
    missing.add(reason);
    return reason;
  };
  const add = (name, forecast, seen, text, reason) =>
    rows.push(
      tableRow(columns, [
        name,
        text(forecast),
        seen === null || seen === undefined ? why(reason) : text(seen),
        seen === null || seen === undefined || !forecast ? "" : signedPercent(seen / forecast - 1, 2),
      ]),
    );
  add("peak, plain", summary.plain_peak_bytes, plain?.peak_bytes, bytesText, plain ? "no meter" : "not run");
  add("peak, planned", summary.predicted_peak_bytes, planned?.peak_bytes, bytesText, "no meter");
  add("time, plain", summary.plain_seconds, plain?.seconds, secondsText, "not run");
  const extra = summary.calibrated_extra_seconds;
  const calibrated =
    extra === null || extra === undefined ? undefined : summary.calibrated_plain_seconds + extra;
  add(
    "time, planned",
    summary.plain_seconds + summary.predicted_extra_seconds,
    planned?.seconds ?? calibrated,
    secondsText,
    "not timed",
  );
  const share = (seconds, whole) => (whole ? seconds / whole : 0);
  const seen = measuredExtra(data);
  const forecast = share(summary.predicted_extra_seconds, summary.plain_seconds);
  rows.push(
    tableRow(columns, [
      "extra time",
      signedPercent(forecast),
      seen === null ? why("not timed") : signedPercent(seen),
      seen === null ? "" : `${signedPercent(seen - forecast)} of the step`,
    ]),
  );
  const pairs = data.measured_extra !== null && data.measured_extra !== undefined;
  const timed =
    seen === null || pairs
      ? null
      : "extra time: no plain step ran beside these; of the planned ones, what recording and running again took.";
  return element(
    "div",
    {},
    table("Forecast against measured", columns, rows),
    timed ? element("p", {class: "quiet"}, timed) : null,
    ...[...missing].map((reason) => element("p", {class: "quiet"}, `${reason}: ${MISSING[reason]}`)),
  );
}
