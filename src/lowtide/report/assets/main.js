// Puts the page together, and draws again where width, colours or choices change.
"use strict";

(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const at = (id) => document.getElementById(id);
  const plain = new Step(data, "plain");
  const planned = new Step(data, "planned");
  const steps = [plain, planned];
  const {summary} = data;
  const budget = summary.budget_bytes;
  const highest = Math.max(plain.peakBytes, planned.peakBytes, 1);
  const whole = Math.max(plain.seconds, planned.seconds, 1e-9);
  const scale = Math.max(highest, budget || 0);

  at("title").textContent = data.title;
  at("about").textContent =
    `Plan by policy ${summary.policy} for ${summary.device}` +
    `${budget ? `, budget ${bytesText(budget)}` : ""}.`;
  at("helps").append(...data.helps.map((line) => element("li", {}, line)));
  at("tiles").append(...tiles(data));
  const alone = summary.by_operation ? ", operation by operation" : "";
  at("peaks").append(
    peakBar(`Plain step${alone}`, plain, scale, budget),
    peakBar(`Planned step${alone}`, planned, scale, budget),
  );
  if (alone)
    at("peaks").append(
      element(
        "p",
        {class: "quiet"},
        `Here and below each operation runs by itself. The compiler fuses them: compiled, the plain step takes ` +
          `${bytesText(summary.plain_peak_bytes)} and the planned one ${bytesText(summary.predicted_peak_bytes)}.`,
      ),
    );

  let view = [0, whole];
  let by = "layer";
  let groups = new Groups(steps, by);
  let latest = [planned, planned.peakTick, "Planned step"];
  const shared = {
    steps,
    budget,
    whole,
    height: () => (innerWidth < 620 ? 210 : 250),
    tell: (step, tick, name) => {
      latest = [step, tick, name];
      at("who").replaceChildren(...who(step, tick, name));
    },
    zoom: (from, to) => {
      const least = whole * 1e-4;
      const middle = (from + to) / 2;
      if (to - from < least) [from, to] = [middle - least / 2, middle + least / 2];
      view = [Math.max(0, from), Math.min(whole, to)];
      drawSteps();
    },
    closer: (moment, factor) => {
      const half = ((view[1] - view[0]) * factor) / 2;
      shared.zoom(Math.max(0, moment - half), Math.min(whole, moment + half));
    },
  };
  const charts = [
    new StackChart(at("chart-plain"), plain, "Plain step", shared),
    new StackChart(at("chart-planned"), planned, "Planned step", shared),
  ];

  function drawSteps() {
    for (const chart of charts) chart.draw(view[0], view[1], groups, scale);
  }

  function legend() {
    const shown = groups.list.filter(
      (group) => group.kind !== "activation" || groups.by === "part" || groups.inner < 2,
    );
    const items = shown.map((group) => element("li", {}, swatch(groups.color(group)), groups.words(group)));
    if (shown.length < groups.list.length) {
      const inner = groups.list.filter((group) => group.kind === "activation");
      const ramp = `linear-gradient(90deg, ${inner.map((group) => groups.color(group)).join(", ")})`;
      const wide = swatch(ramp);
      wide.style.width = "4em";
      const place = shown.findIndex((group) => KINDS.indexOf(group.kind) > KINDS.indexOf("activation"));
      items.splice(
        place < 0 ? items.length : place,
        0,
        element("li", {}, wide, `activations, from ${inner[0].inside} to ${inner[inner.length - 1].inside}`),
      );
    }
    at("legend").replaceChildren(...items);
  }

  function drawAll() {
    drawSteps();
    legend();
    if (data.points.length > 1) budgetsChart(at("chart-budgets"), data);
    if (curves.length > 1) measuredChart(at("chart-measured"), data, curves);
  }

  for (const input of document.querySelectorAll('input[name="by"]')) {
    input.addEventListener("change", () => {
      by = input.value;
      groups = new Groups(steps, by);
      drawSteps();
      legend();
    });
  }
  for (const input of document.querySelectorAll('input[name="holders"]')) {
    input.addEventListener("change", () =>
      at("holders").replaceChildren(holdersTable(input.value === "plain" ? plain : planned)),
    );
  }
  const middle = () => latest[0].ticks.seconds[latest[1]];
  at("zoom-in").addEventListener("click", () => shared.closer(middle(), 0.5));
  at("zoom-out").addEventListener("click", () => shared.closer(middle(), 2));
  at("zoom-whole").addEventListener("click", () => shared.zoom(0, whole));
  at("zoom-peak").addEventListener("click", () => {
    const moment = planned.ticks.seconds[planned.peakTick];
    shared.zoom(Math.max(0, moment - whole * 0.04), Math.min(whole, moment + whole * 0.04));
    charts[1].toPeak();
  });

  at("holders").append(holdersTable(planned));
  const used = Object.entries(DECISION_COLORS).filter((_, k) =>
    data.decided.some((row) => row.saved_bytes[k]),
  );
  at("decided-legend").append(...used.map(([name, fill]) => element("li", {}, swatch(variable(fill)), name)));
  at("decided").append(decidedTable(data));
  if (data.points.length > 1) {
    at("budgets-about").textContent =
      "Each point is a plan by recomputation. No schedule of the same operations is below the dashed line.";
    const best = swatch(variable("quiet"), "line");
    dashed(best, "quiet");
    at("budgets-legend").append(
      element("li", {}, swatch(variable("temporary")), "this plan"),
      element("li", {}, swatch(variable("activation"), "line"), "plans for other budgets"),
      element("li", {}, best, "best possible"),
    );
    at("budgets").append(budgetsTable(data));
  } else {
    at("budgets-about").textContent =
      "No other budget was planned for: lowtide train --report does that, and handle.report.";
    at("budgets").parentElement.hidden = true;
  }

  const forecast = (step) => Array.from(step.live, (bytes, tick) => [step.ticks.seconds[tick], bytes]);
  const curves = [];
  for (const [name, step, seen, fill] of [
    ["plain", plain, data.measured_plain, "temporary"],
    ["planned", planned, data.measured_planned, "activation"],
  ]) {
    if (!seen || !seen.curve.length) continue;
    curves.push({name: `${name}, measured`, moments: seen.curve, color: fill});
    curves.push({name: `${name}, forecast`, moments: forecast(step), color: fill, dash: [5, 3]});
  }
  at("measured").append(
    data.measured_planned || summary.calibrated_plain_seconds
      ? measuredTable(data)
      : element("p", {class: "quiet"}, "Nothing was measured: this plan was made without running the step."),
  );
  at("measured-legend").append(
    ...curves.map((curve) => {
      const line = swatch(variable(curve.color), "line");
      if (curve.dash) dashed(line, curve.color);
      return element("li", {}, line, curve.name);
    }),
  );
  if (summary.notes.length) {
    at("notes-section").hidden = false;
    at("notes").append(...summary.notes.map((note) => element("li", {}, note)));
  }

  drawAll();
  shared.tell(...latest);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  let width = innerWidth;
  let waiting = 0;
  addEventListener("resize", () => {
    cancelAnimationFrame(waiting);
    waiting = requestAnimationFrame(() => {
      if (innerWidth !== width) {
        width = innerWidth;
        drawAll();
      }
    });
  });
})();
